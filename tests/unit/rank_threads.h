// Ranks as threads of a test, each with a connection of its own to one store.
#pragma once

#include <thread>
#include <vector>

#include "comm/store.h"

namespace tandem {

// Runs body(rank, store) on `size` threads and waits for all of them.
template <class Body>
void on_rank_threads(int size, Body&& body) {
  const Store server = Store::serve("127.0.0.1", 0, 30);
  std::vector<std::thread> ranks;
  for (int r = 0; r < size; ++r)
    ranks.emplace_back([&, r] {
      const Store client = Store::connect("127.0.0.1", server.port(), 30);
      body(r, client);
    });
  for (auto& t : ranks) t.join();
}

}  // namespace tandem
