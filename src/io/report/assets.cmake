# dmattn_add_report_assets(TARGET): compiles the report page's pieces into it.
set(DMATTN_REPORT_DIR ${CMAKE_CURRENT_LIST_DIR})

function(dmattn_add_report_assets target)
  file(GLOB pieces CONFIGURE_DEPENDS ${DMATTN_REPORT_DIR}/*.html ${DMATTN_REPORT_DIR}/*.css ${DMATTN_REPORT_DIR}/*.js)
  set(out ${CMAKE_CURRENT_BINARY_DIR}/report_assets.cpp)
  add_custom_command(OUTPUT ${out}
    COMMAND ${CMAKE_COMMAND} -DOUT=${out} -DDIR=${DMATTN_REPORT_DIR} -P ${DMATTN_REPORT_DIR}/embed.cmake
    DEPENDS ${pieces} ${DMATTN_REPORT_DIR}/embed.cmake
    COMMENT "Embedding the report page" VERBATIM)
  target_sources(${target} PRIVATE ${out})
endfunction()
