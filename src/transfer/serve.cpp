// The two routes. Checksums cross as hexadecimal text: they are compared, never computed with.
#include "transfer/serve.h"

#include "base/check.h"
#include "base/clock.h"
#include "base/json.h"

namespace tandem {
namespace {

Json sums_json(const std::vector<BoxSum>& sums) {
  Json out = Json::array();
  for (const BoxSum& s : sums)
    out.push_back({{"box", s.box},
                   {"tensor", s.tensor},
                   {"sum", fmt::format("{:08x}{:08x}", s.sum.a, s.sum.b)}});
  return out;
}

std::int64_t version_of(const http::Request& request) {
  return require<std::int64_t>(parse_json(request.body, "request body"), "weight_version",
                               "request body");
}

void answer(const http::Respond& respond, const std::function<Json()>& work) {
  http::guarded(respond, [&] { respond({.status = 200, .body = dump_json(work())}); });
}

}  // namespace

void add_weight_routes(http::Server& server, WeightHooks hooks, WeightUpdate& update) {
  const auto& post = hooks.post;
  const auto& last_write = hooks.last_write;
  server.route(
      "POST", "/weights/move",
      [post = hooks.post_move, &update, last_write](http::Request request, http::Respond respond) {
        const std::int64_t version = version_of(request);
        post([=, &update] {
          answer(respond, [&] {
            const double start = monotonic_seconds(), written = last_write();
            const MoveReport r = update.move(version);
            return Json{{"weight_version", r.version},
                        {"waited_seconds", written > 0 ? start - written : 0.0},
                        {"announce_seconds", r.announce_seconds},
                        {"move_seconds", r.move_seconds},
                        {"verify_seconds", r.verify_seconds},
                        {"total_bytes", r.total_bytes},
                        {"moved_bytes", r.moved_bytes},
                        {"decoded_tokens", r.decoded_tokens},
                        {"sent", sums_json(r.sent)},
                        {"received", sums_json(r.received)}};
          });
        });
      });
  server.route(
      "POST", "/weights/swap",
      [post, &update, after_swap = hooks.after_swap](http::Request request, http::Respond respond) {
        const std::int64_t version = version_of(request);
        post([=, &update] {
          answer(respond, [&] {
            const double start = monotonic_seconds();
            update.swap(version);
            return Json{{"weight_version", version}, {"swap_seconds", monotonic_seconds() - start}};
          });
          if (after_swap) after_swap();
        });
      });
  server.route("POST", "/weights/check",
               [post, &update, gather = hooks.gather](http::Request, http::Respond respond) {
                 post([=, &update] {
                   answer(respond, [&] {
                     const CheckReport r = update.check(gather());
                     return Json{{"weight_version", r.version ? Json(*r.version) : Json()},
                                 {"fresh", sums_json(r.fresh)},
                                 {"served", sums_json(r.served)}};
                   });
                 });
               });
}

}  // namespace tandem
