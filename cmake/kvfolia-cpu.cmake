# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

set(kvfolia_no_highway "needs Highway 1.0.3 or later (its CMake package hwy), which was not found: \
install libhwy-dev, or give its prefix in CMAKE_PREFIX_PATH")

# Looks for Highway and sets hwy_FOUND. Its target is made visible everywhere, as kvfolia::cpu is.
macro(kvfolia_find_highway)
  if(TARGET hwy::hwy)
    set(hwy_FOUND TRUE)
  else()
    find_package(hwy 1.0.3 CONFIG QUIET GLOBAL)
  endif()
endmacro()

# Makes kvfolia::cpu once Highway has been found. It is made where it is used, not exported: so a package
# needs Highway only for those who ask for the CPU kernels. Threads come from the caller's executor.
function(kvfolia_add_cpu)
  if(NOT TARGET kvfolia::cpu)
    add_library(kvfolia::cpu INTERFACE IMPORTED GLOBAL)
    target_link_libraries(kvfolia::cpu INTERFACE kvfolia::kvfolia hwy::hwy)
  endif()
endfunction()
