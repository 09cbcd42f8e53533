# libtorch from the PyPI wheel in .venv (find_package(Torch) of that wheel needs a CUDA toolkit, a
# CPU build does not). Targets: torch_cpu, with c10, libgomp and the two small CUDA libraries that
# libtorch_cpu.so itself needs. TANDEM_TORCH_DIR names another torch package folder.
set(TANDEM_TORCH_DIR "" CACHE PATH "Folder of the torch Python package (holds include/ and lib/)")
if(NOT TANDEM_TORCH_DIR)
  file(GLOB torch_found ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
  list(GET torch_found 0 torch_dir)
else()
  set(torch_dir ${TANDEM_TORCH_DIR})
endif()
if(NOT EXISTS ${torch_dir}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "libtorch_cpu.so not found under '${torch_dir}/lib': run scripts/setup.sh, or set TANDEM_TORCH_DIR to the folder of the torch package")
endif()
get_filename_component(torch_site ${torch_dir} DIRECTORY)
file(GLOB torch_cuda_lib_dirs ${torch_site}/nvidia/cu13/lib)
set(torch_rpath ${torch_dir}/lib ${torch_cuda_lib_dirs})

add_library(c10 SHARED IMPORTED)
set_target_properties(c10 PROPERTIES IMPORTED_LOCATION ${torch_dir}/lib/libc10.so)
add_library(torch_cpu SHARED IMPORTED)
set_target_properties(torch_cpu PROPERTIES
  IMPORTED_LOCATION ${torch_dir}/lib/libtorch_cpu.so
  INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO"
  INTERFACE_LINK_LIBRARIES "c10")
# The wheel's include folder also holds copies of other libraries (an fmt of another version than
# the system's, for one), so only torch's own folders are put on the path.
set(torch_include ${CMAKE_BINARY_DIR}/torch_include)
file(MAKE_DIRECTORY ${torch_include})
foreach(folder ATen c10 caffe2 torch)
  file(CREATE_LINK ${torch_dir}/include/${folder} ${torch_include}/${folder} SYMBOLIC)
endforeach()
target_include_directories(torch_cpu SYSTEM INTERFACE
  ${torch_include} ${torch_include}/torch/csrc/api/include)
# OpenMP: the wheel's own libgomp, so that one process holds one OpenMP runtime.
add_library(gomp SHARED IMPORTED)
set_target_properties(gomp PROPERTIES IMPORTED_LOCATION ${torch_dir}/lib/libgomp.so.1)
set(CMAKE_BUILD_RPATH ${torch_rpath})
foreach(dir ${torch_rpath})
  add_link_options(LINKER:-rpath-link,${dir})
endforeach()
link_directories(${torch_cuda_lib_dirs})
