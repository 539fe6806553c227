# DMATTN_SANITIZE: "" | "address,undefined" | "thread". Instruments everything in the build, and leaves in
# DMATTN_TEST_ENVIRONMENT what a test needs to run under it.
set(DMATTN_SANITIZE "" CACHE STRING "Sanitizers: empty, address,undefined or thread")
set(DMATTN_TEST_ENVIRONMENT OMP_WAIT_POLICY=passive)  # tests share cores; spinning threads would starve each other

if(DMATTN_SANITIZE)
  set(flags -fsanitize=${DMATTN_SANITIZE} -fno-omit-frame-pointer)
  if(DMATTN_SANITIZE MATCHES "undefined")
    list(APPEND flags -fsanitize=float-cast-overflow -fno-sanitize-recover=all)
  endif()
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:${flags}>")
  add_link_options("${flags}")
endif()

if(DMATTN_BUILD_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "DMATTN_BUILD_FUZZ needs clang (libFuzzer); the compiler is ${CMAKE_CXX_COMPILER_ID}. "
                        "Use the asan preset.")
  endif()
  # The whole build carries coverage counters, so the fuzzer sees into the library.
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=fuzzer-no-link>")
  add_link_options(-fsanitize=fuzzer-no-link)
endif()

if(DMATTN_SANITIZE MATCHES "thread")
  # ThreadSanitizer cannot see OpenMP's barriers inside the uninstrumented runtime. libarcher, which comes with LLVM's
  # runtime, reports them; GCC's runtime has no such tool, hence clang.
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "DMATTN_SANITIZE=thread needs clang and LLVM's OpenMP: use the tsan preset")
  endif()
  string(REGEX MATCH "^[0-9]+" clang_major "${CMAKE_CXX_COMPILER_VERSION}")
  find_library(DMATTN_ARCHER NAMES archer HINTS /usr/lib/llvm-${clang_major}/lib)
  if(NOT DMATTN_ARCHER)
    message(FATAL_ERROR "libarcher.so not found: install libomp-${clang_major}-dev, or set DMATTN_ARCHER")
  endif()
  list(APPEND DMATTN_TEST_ENVIRONMENT OMP_TOOL_LIBRARIES=${DMATTN_ARCHER}
       "TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1")
elseif(DMATTN_SANITIZE MATCHES "address")
  list(APPEND DMATTN_TEST_ENVIRONMENT "ASAN_OPTIONS=strict_string_checks=1:detect_stack_use_after_return=1"
       UBSAN_OPTIONS=print_stacktrace=1
       LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/asan/leaks.supp:print_suppressions=0)
endif()

# ctest reads the file that this writes before it runs a test. (As a property, a list does not survive the quoting of
# discovered tests.) What the user has set stays.
function(dmattn_use_test_environment)
  set(content "")
  foreach(entry IN LISTS DMATTN_TEST_ENVIRONMENT)
    string(REGEX MATCH "^([^=]+)=(.*)$" matched "${entry}")
    string(APPEND content
      "if(NOT DEFINED ENV{${CMAKE_MATCH_1}})\n  set(ENV{${CMAKE_MATCH_1}} [==[${CMAKE_MATCH_2}]==])\nendif()\n")
  endforeach()
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/test_environment.cmake CONTENT "${content}" @ONLY)
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${CMAKE_CURRENT_BINARY_DIR}/test_environment.cmake)
endfunction()
