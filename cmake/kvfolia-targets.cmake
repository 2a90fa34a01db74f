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

include(${CMAKE_CURRENT_LIST_DIR}/kvfolia-cpu.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/kvfolia-cuda.cmake)
