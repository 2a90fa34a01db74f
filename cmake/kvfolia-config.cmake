# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# find_package(kvfolia [COMPONENTS cpu cuda]): kvfolia::kvfolia always, kvfolia::cpu and kvfolia::cuda
# on request.

include(${CMAKE_CURRENT_LIST_DIR}/kvfolia-export.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/kvfolia-cpu.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/kvfolia-cuda.cmake)

foreach(component IN LISTS kvfolia_FIND_COMPONENTS)
  if(component STREQUAL "cpu")
    kvfolia_find_highway()
    if(hwy_FOUND)
      kvfolia_add_cpu()
      set(kvfolia_cpu_FOUND TRUE)
    elseif(kvfolia_FIND_REQUIRED_cpu)
      set(kvfolia_FOUND FALSE)
      set(kvfolia_NOT_FOUND_MESSAGE "kvfolia's component cpu ${kvfolia_no_highway}")
      return()
    endif()
  elseif(component STREQUAL "cuda")
    find_package(CUDAToolkit QUIET)
    if(CUDAToolkit_FOUND)
      kvfolia_add_cuda()
      set(kvfolia_cuda_FOUND TRUE)
    elseif(kvfolia_FIND_REQUIRED_cuda)
      set(kvfolia_FOUND FALSE)
      set(kvfolia_NOT_FOUND_MESSAGE "kvfolia's component cuda needs the CUDA Toolkit, which was not found")
      return()
    endif()
  elseif(kvfolia_FIND_REQUIRED_${component})
    set(kvfolia_FOUND FALSE)
    set(kvfolia_NOT_FOUND_MESSAGE "kvfolia has no component ${component}: there are cpu and cuda")
    return()
  endif()
endforeach()
