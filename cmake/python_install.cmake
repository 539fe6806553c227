# What a wheel holds beside the Python files: the shared library and, where it is built, the command. Included only when
# scikit-build-core drives CMake; pyproject.toml installs this component alone, at the root of the wheel.
if(APPLE)
  set(dmattn_library_name libdelta_matching.dylib)
else()
  set(dmattn_library_name libdelta_matching.so)
endif()

# One plain file under its unversioned name: a wheel cannot hold the links of a versioned library, it would hold copies.
install(FILES $<TARGET_FILE:delta_matching> DESTINATION delta_matching/lib RENAME ${dmattn_library_name}
        PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE
        COMPONENT python)
# Inside the package, since the directory of scripts is not at a fixed place relative to it; an entry point starts it.
if(TARGET dmattn)
  install(TARGETS dmattn RUNTIME DESTINATION delta_matching/bin COMPONENT python)
endif()
