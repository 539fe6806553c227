# cmake -DSOURCE=... -DOUT=... -P revision.cmake: writes a header with the commit and the trees that a build was made
# from, empty where git does not know them. Run by every build; unchanged content keeps its time stamp.
function(ask result)
  execute_process(COMMAND git ${ARGN} WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE answer ERROR_QUIET
                  OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(failed)
    set(answer "")
  endif()
  set(${result} "${answer}" PARENT_SCOPE)
endfunction()

# The hash of `name`, unless files of `paths` differ from what it names.
function(revision result name)
  ask(hash rev-parse --verify ${name})
  ask(changes status --porcelain -- ${ARGN})
  if(NOT changes STREQUAL "" AND NOT hash STREQUAL "")
    set(hash "${hash}-dirty")
  endif()
  set(${result} "${hash}" PARENT_SCOPE)
endfunction()

set(commit "")
set(tree_cuda "")
set(tree_numerics "")
ask(top rev-parse --show-toplevel)
get_filename_component(source "${SOURCE}" REALPATH)
if(top STREQUAL source)  # else git speaks of another repository around this one
  revision(commit HEAD CMakeLists.txt cli cmake include src)
  revision(tree_cuda HEAD:src/cuda src/cuda)
  revision(tree_numerics HEAD:src/numerics src/numerics)
endif()
file(CONFIGURE OUTPUT ${OUT} @ONLY CONTENT [[
#pragma once
#define DMATTN_BUILT_COMMIT "@commit@"
#define DMATTN_BUILT_TREE_CUDA "@tree_cuda@"
#define DMATTN_BUILT_TREE_NUMERICS "@tree_numerics@"
]])
