# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# The library's targets in the build tree. kvfolia-config.cmake makes the same ones from an installed
# package.

include(GNUInstallDirs)

add_library(kvfolia INTERFACE)
add_library(kvfolia::kvfolia ALIAS kvfolia)
target_compile_features(kvfolia INTERFACE cxx_std_20)
target_include_directories(kvfolia INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                             $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

# The CPU kernels. Threads come from the caller's executor.
add_library(kvfolia_cpu INTERFACE)
add_library(kvfolia::cpu ALIAS kvfolia_cpu)
set_target_properties(kvfolia_cpu PROPERTIES EXPORT_NAME cpu)
target_link_libraries(kvfolia_cpu INTERFACE kvfolia)

include(${CMAKE_CURRENT_LIST_DIR}/kvfolia-cuda.cmake)
