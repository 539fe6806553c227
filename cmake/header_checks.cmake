# Every header compiles alone and twice (so it includes what it uses and has a guard), and the numerics headers
# compile as CUDA. Nothing is linked: a header that fails breaks the build.
option(DMATTN_CHECK_HEADERS "Compile every header alone" OFF)

# Writes a source that includes `header` twice; unchanged content keeps its time stamp.
function(dmattn_header_source header extension result)
  string(MAKE_C_IDENTIFIER "${header}" stem)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/header_checks/${stem}.${extension})
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"@header@\"\n#include \"@header@\"\n" @ONLY)
  set(${result} ${source} PARENT_SCOPE)
endfunction()

if(DMATTN_CHECK_HEADERS)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/src/*.h)
  list(FILTER headers EXCLUDE REGEX "^cuda/")  # device code: compiled by nvcc with its kernels
  set(sources "")
  foreach(header IN LISTS headers ITEMS delta_matching/delta_matching.h delta_matching/delta_matching.hpp)
    dmattn_header_source(${header} cpp source)
    list(APPEND sources ${source})
  endforeach()
  add_library(dmattn_header_checks OBJECT ${sources})
  target_compile_options(dmattn_header_checks PRIVATE -fsyntax-only)
  target_link_libraries(dmattn_header_checks PRIVATE dmattn_internal dmattn_warnings)

  # The public header is C99, the C++ one C++17: what their users' compilers may be set to.
  dmattn_header_source(delta_matching/delta_matching.h c source)
  add_library(dmattn_header_check_c OBJECT ${source})
  set_target_properties(dmattn_header_check_c PROPERTIES C_STANDARD 99 C_EXTENSIONS OFF)
  target_compile_options(dmattn_header_check_c PRIVATE -Wall -Wextra -Wpedantic -Werror)
  target_include_directories(dmattn_header_check_c PRIVATE ${PROJECT_SOURCE_DIR}/include)
  dmattn_header_source(delta_matching/delta_matching.hpp cc source)
  add_library(dmattn_header_check_cpp17 OBJECT ${source})
  set_target_properties(dmattn_header_check_cpp17 PROPERTIES CXX_STANDARD 17)
  target_compile_options(dmattn_header_check_cpp17 PRIVATE -Wall -Wextra -Wpedantic -Werror)
  target_include_directories(dmattn_header_check_cpp17 PRIVATE ${PROJECT_SOURCE_DIR}/include)
endif()

if(DMATTN_CUDA)
  file(GLOB headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/src/numerics/*.h)
  # A static function that nothing calls is dropped unchecked. With external linkage every one becomes device code, and a
  # call to a host function in it is an error.
  set(content "#include \"numerics/hd.h\"\n#undef DMATTN_HD\n#define DMATTN_HD __host__ __device__\n")
  foreach(header IN LISTS headers)
    string(APPEND content "#include \"${header}\"\n")
  endforeach()
  set(source ${CMAKE_CURRENT_BINARY_DIR}/header_checks/numerics.cu)
  file(CONFIGURE OUTPUT ${source} CONTENT "${content}" @ONLY)
  add_library(dmattn_cuda_header_checks OBJECT ${source})
  target_include_directories(dmattn_cuda_header_checks PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_compile_options(dmattn_cuda_header_checks PRIVATE -Werror all-warnings)
endif()
