# Install tree: headers, shared library, CMake package, pkg-config file; cli/ adds the command. It can be moved as a
# whole.
if(SKBUILD)
  include(python_install OPTIONAL)  # a wheel holds the library inside the Python package and nothing else
  return()
endif()

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/delta_matching)

install(TARGETS delta_matching EXPORT delta_matchingTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/delta_matching DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

install(EXPORT delta_matchingTargets NAMESPACE delta_matching:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/delta_matchingConfig.cmake.in
  ${PROJECT_BINARY_DIR}/delta_matchingConfig.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break the ABI.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/delta_matchingConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/delta_matchingConfig.cmake ${PROJECT_BINARY_DIR}/delta_matchingConfigVersion.cmake
        DESTINATION ${package_dir})

# The prefix is found from the .pc file's own place, so the path from there must be relative.
file(RELATIVE_PATH DMATTN_PC_TO_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${PROJECT_SOURCE_DIR}/cmake/delta_matching.pc.in ${PROJECT_BINARY_DIR}/delta_matching.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/delta_matching.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
