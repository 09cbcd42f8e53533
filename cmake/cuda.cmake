# libtandem_cuda.so: the kernels of src/ops/cuda, loaded at run time by a program that is built
# without them. Needs nvcc 13 and torch's CUDA headers, no GPU. cuBLAS and the other CUDA libraries
# come with libtorch_cuda at run time, so they are not linked here. nvcc is called by custom
# commands, because CMake 3.25 does not know nvcc 13's dialects.
find_package(CUDAToolkit 13.0 REQUIRED)
file(GLOB cuda_kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/ops/cuda/*.cu)
file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/ops/cuda/*.cpp)
set(cuda_objects "")
set(nvcc_flags -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -Xcompiler=-fPIC,-fvisibility=hidden,-Wall -DNDEBUG)
foreach(file ${cuda_kernels})
  get_filename_component(stem ${file} NAME_WE)
  set(object ${CMAKE_BINARY_DIR}/cuda/${stem}.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/cuda
    COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} ${nvcc_flags} -I${CMAKE_SOURCE_DIR}/src -MD -MF ${object}.d -MT ${object} -c ${file} -o ${object}
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
