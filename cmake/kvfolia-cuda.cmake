# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# Makes kvfolia::cuda once CUDAToolkit has been found. It is made where it is used, not exported: so a
# package that was built without CUDA serves CUDA users.
function(kvfolia_add_cuda)
  if(NOT TARGET kvfolia::cuda)
    add_library(kvfolia::cuda INTERFACE IMPORTED GLOBAL)
    target_link_libraries(kvfolia::cuda INTERFACE kvfolia::kvfolia CUDA::cudart)
  endif()
endfunction()
