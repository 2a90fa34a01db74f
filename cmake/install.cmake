# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

include(CMakePackageConfigHelpers)

set(kvfolia_package_dir ${CMAKE_INSTALL_DATADIR}/cmake/kvfolia)
install(DIRECTORY include/kvfolia DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS kvfolia EXPORT kvfolia-export)
install(EXPORT kvfolia-export NAMESPACE kvfolia:: DESTINATION ${kvfolia_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvfolia-config-version.cmake
                                 COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES cmake/kvfolia-config.cmake cmake/kvfolia-cpu.cmake cmake/kvfolia-cuda.cmake
              ${PROJECT_BINARY_DIR}/kvfolia-config-version.cmake
        DESTINATION ${kvfolia_package_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/kvfolia)
