# libtandem_cuda.so: the kernels of src/ops/cuda, loaded at run time by a program that is built
# without them. Needs nvcc 13 and torch's CUDA headers, no GPU. cuBLAS and the other CUDA libraries
# come with libtorch_cuda at run time, so they are not linked here. nvcc is called by custom
# commands, because CMake 3.25 does not know nvcc 13's dialects.
find_package(CUDAToolkit 13.0 REQUIRED)
set(TANDEM_FLASHINFER_DIR "${CMAKE_SOURCE_DIR}/.cache/flashinfer-0.7.2.post1/flashinfer/data" CACHE PATH "Folder of FlashInfer's headers (holds include/ and cccl/)")
if(NOT EXISTS ${TANDEM_FLASHINFER_DIR}/include/flashinfer/attention/prefill.cuh)
  message(FATAL_ERROR "FlashInfer's headers not found under '${TANDEM_FLASHINFER_DIR}': run scripts/setup.sh --cuda, or set TANDEM_FLASHINFER_DIR")
endif()
# Without cuDNN's front end, which is headers alone, training attends by FlashAttention-2.
set(TANDEM_CUDNN_FRONTEND_DIR "${CMAKE_SOURCE_DIR}/.cache/cudnn-frontend-1.16.0/include" CACHE PATH "Folder of cuDNN's front end (holds cudnn_frontend.h)")
# FlashInfer's kernels want the CCCL that comes with them, newer than nvcc 13.0's own.
set(flashinfer_includes "")
foreach(folder include cccl/libcudacxx/include cccl/cub cccl/thrust)
  list(APPEND flashinfer_includes -isystem ${TANDEM_FLASHINFER_DIR}/${folder})
endforeach()
file(GLOB cuda_kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/ops/cuda/*.cu)
file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/ops/cuda/*.cpp)
# Not the system's: the headers must be of the version that torch loads (cudnn.cpp checks it).
find_path(TANDEM_CUDNN_INCLUDE_DIR cudnn.h PATHS ${torch_dir}/../nvidia/cudnn/include ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH)
if(EXISTS ${TANDEM_CUDNN_FRONTEND_DIR}/cudnn_frontend.h AND TANDEM_CUDNN_INCLUDE_DIR)
  list(REMOVE_ITEM cuda_sources ${CMAKE_SOURCE_DIR}/src/ops/cuda/cudnn_absent.cpp)
  set_source_files_properties(${CMAKE_SOURCE_DIR}/src/ops/cuda/cudnn.cpp PROPERTIES COMPILE_OPTIONS "-isystem;${TANDEM_CUDNN_FRONTEND_DIR};-isystem;${TANDEM_CUDNN_INCLUDE_DIR};-DCUDNN_FRONTEND_SKIP_JSON_LIB")
else()
  message(STATUS "cuDNN's front end not found under '${TANDEM_CUDNN_FRONTEND_DIR}' (scripts/setup.sh --cuda brings it), or no cudnn.h: training attends by FlashAttention-2, slower")
  list(REMOVE_ITEM cuda_sources ${CMAKE_SOURCE_DIR}/src/ops/cuda/cudnn.cpp)
endif()
set(cuda_objects "")
set(nvcc_flags -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -Xcompiler=-fPIC,-fvisibility=hidden,-Wall -DNDEBUG)
foreach(file ${cuda_kernels})
  get_filename_component(stem ${file} NAME_WE)
  set(object ${CMAKE_BINARY_DIR}/cuda/${stem}.o)
  set(includes "")
  set(flags ${nvcc_flags})
  if(stem MATCHES "^paged_[0-9]")
    set(includes ${flashinfer_includes})
    list(APPEND flags -fmad=false)  # or a masked tile of keys changes a row's bits (docs/exact-gpu.md)
  endif()
  add_custom_command(OUTPUT ${object}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/cuda
    COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} ${flags} -I${CMAKE_SOURCE_DIR}/src ${includes} -MD -MF ${object}.d -MT ${object} -c ${file} -o ${object}
    DEPENDS ${file} DEPFILE ${object}.d COMMENT "Building CUDA object ${stem}.o" VERBATIM)
  list(APPEND cuda_objects ${object})
endforeach()
foreach(library torch_cuda c10_cuda)
  add_library(${library} SHARED IMPORTED)
  set_target_properties(${library} PROPERTIES IMPORTED_LOCATION ${torch_dir}/lib/lib${library}.so)
endforeach()
add_library(tandem_cuda SHARED ${cuda_sources} ${cuda_objects})
set_target_properties(tandem_cuda PROPERTIES
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR} CXX_VISIBILITY_PRESET hidden)
target_include_directories(tandem_cuda PRIVATE ${CMAKE_SOURCE_DIR}/src)
target_include_directories(tandem_cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(tandem_cuda PRIVATE torch_cuda c10_cuda torch_cpu c10 CUDA::cudart)
# Registering torch's CUDA operators is what libtorch_cuda is linked for, so it must stay named.
target_link_options(tandem_cuda PRIVATE LINKER:--no-as-needed LINKER:--allow-shlib-undefined)
