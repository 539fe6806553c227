add_library(dmattn_warnings INTERFACE)
target_compile_options(dmattn_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wcast-align>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${DMATTN_WERROR}>>:-Werror>)
