# Tests that are programs of their own: the install tree and its consumers, the include direction, the instruction-set
# objects, and the thread sanitizer's own check.

find_program(BASH_PROGRAM bash)
find_package(Python3 3.9 COMPONENTS Interpreter)

# A consumer outside this build links without the sanitizers' runtimes, so only plain builds are installed.
if(BASH_PROGRAM AND NOT DMATTN_SANITIZE AND NOT DMATTN_BUILD_FUZZ)
  add_test(NAME install_tree COMMAND ${BASH_PROGRAM} ${PROJECT_SOURCE_DIR}/tests/install/run.sh
           ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR} ${CMAKE_C_COMPILER} ${CMAKE_COMMAND} "${CMAKE_GENERATOR}")
  set_tests_properties(install_tree PROPERTIES TIMEOUT 300)
endif()

if(Python3_FOUND)
  add_test(NAME include_direction
           COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/check_includes.py ${PROJECT_SOURCE_DIR})
endif()

# The C example against the library of this build, sanitizers included.
add_executable(attention_example ${PROJECT_SOURCE_DIR}/examples/c/attention.c)
set_target_properties(attention_example PROPERTIES C_STANDARD 99 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
target_compile_options(attention_example PRIVATE -Wall -Wextra -Wpedantic -Werror)
target_link_libraries(attention_example PRIVATE delta_matching m)
if(DMATTN_SANITIZE)
  set_target_properties(attention_example PROPERTIES LINKER_LANGUAGE CXX)  # the runtime's C++ half, for the library
endif()
add_test(NAME attention_example COMMAND attention_example)

# A weak symbol in an object built for AVX-512 may be the copy that the linker keeps for everyone, and then the program
# dies on an older CPU. Those objects may define nothing weak.
if(CMAKE_NM AND DMATTN_ISA_LIBRARIES AND NOT DMATTN_SANITIZE AND NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
  set(objects "")
  foreach(library IN LISTS DMATTN_ISA_LIBRARIES)
    list(APPEND objects $<TARGET_OBJECTS:${library}>)
  endforeach()
  add_test(NAME isa_objects_define_nothing_weak
           COMMAND ${CMAKE_COMMAND} "-DNM=${CMAKE_NM}" "-DOBJECTS=${objects}"
                   -P ${PROJECT_SOURCE_DIR}/cmake/check_weak_symbols.cmake)
endif()

if(DMATTN_SANITIZE MATCHES "thread")
  foreach(kind clean planted)
    add_executable(tsan_${kind} tsan/race.cpp)
    target_link_libraries(tsan_${kind} PRIVATE OpenMP::OpenMP_CXX)
    add_test(NAME tsan_${kind} COMMAND tsan_${kind})
    set_tests_properties(tsan_${kind} PROPERTIES LABELS threads)
  endforeach()
  target_compile_definitions(tsan_planted PRIVATE PLANT_RACE)
  set_tests_properties(tsan_planted PROPERTIES PASS_REGULAR_EXPRESSION "WARNING: ThreadSanitizer: data race")
endif()
