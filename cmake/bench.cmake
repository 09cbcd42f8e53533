# Benchmarks, found by name and built on demand: bench/<what>_bench.cpp.
file(GLOB bench_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/bench/*_bench.cpp)
foreach(file ${bench_sources})
  get_filename_component(stem ${file} NAME_WE)
  add_executable(${stem} EXCLUDE_FROM_ALL ${file})
  target_link_libraries(${stem} PRIVATE td_rank)
  target_include_directories(${stem} PRIVATE ${CMAKE_SOURCE_DIR}/src)
  td_use_torch_pch(${stem})
endforeach()
