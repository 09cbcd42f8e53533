// Routes: check on the server's thread, work on the compute thread, answer from there.
#include "trainer/serve.h"

#include <charconv>
#include <memory>
#include <string>

#include "base/check.h"
#include "base/json.h"

namespace tandem {
namespace {

// Runs the work on the compute thread; what it throws becomes the answer, not the rank's end.
void post_answer(const PostWork& post, http::Respond respond, std::function<Json()> work) {
  post([respond, work = std::move(work)] {
    http::guarded(respond, [&] { respond({.status = 200, .body = dump_json(work())}); });
  });
}

// The body of save and load: {"folder": path, "optimizer", "reference": whether they go along}.
struct SaveCall {
  std::string folder;
  SaveOptions options;
};
SaveCall read_save_call(const std::string& body) {
  const Json json = parse_json(body, "request body");
  return {.folder = require<std::string>(json, "folder", "request body"),
          .options = {.optimizer = require<bool>(json, "optimizer", "request body"),
                      .reference = require<bool>(json, "reference", "request body")}};
}

std::int64_t total_steps(const std::string& query) {
  constexpr std::string_view key = "total_steps=";
  std::int64_t value = 0;
  const char* begin = query.c_str() + key.size();
  const bool found = query.starts_with(key) &&
                     std::from_chars(begin, query.c_str() + query.size(), value).ec == std::errc();
  TD_CHECK(found && value > 0, "total_steps: '{}' found, ?total_steps=N with N > 0 wanted", query);
  return value;
}

}  // namespace

void add_trainer_routes(http::Server& server, PostWork post, Trainer& trainer,
                        std::function<void()> before_train) {
  server.route("POST", "/trainer/train",
               [=, &trainer](http::Request request, http::Respond respond) {
                 auto body = std::make_shared<std::string>(std::move(request.body));
                 const std::int64_t steps = total_steps(request.query);
                 post_answer(post, std::move(respond), [=, &trainer] {
                   const auto batch = decode_batch(std::as_bytes(std::span(*body)), "request body");
                   if (before_train) before_train();
                   return to_json(trainer.train(batch, steps));
                 });
               });
  server.route("GET", "/trainer/progress", [&trainer](http::Request, http::Respond respond) {
    respond({.status = 200,
             .body = dump_json(Json{{"done", trainer.progress.done.load()},
                                    {"total", trainer.progress.total.load()}})});
  });
  server.route("POST", "/trainer/update_reference",
               [=, &trainer](http::Request, http::Respond respond) {
                 post_answer(post, std::move(respond), [&trainer] {
                   trainer.update_reference();
                   return Json::object();
                 });
               });
  server.route("POST", "/trainer/save",
               [=, &trainer](http::Request request, http::Respond respond) {
                 const auto call = read_save_call(request.body);
                 post_answer(post, std::move(respond), [=, &trainer] {
                   return Json{{"file", to_json(trainer.save(call.folder, call.options))},
                               {"optimizer_steps", trainer.optimizer_steps()}};
                 });
               });
  server.route("POST", "/trainer/load",
               [=, &trainer](http::Request request, http::Respond respond) {
                 const auto call = read_save_call(request.body);
                 post_answer(post, std::move(respond), [=, &trainer] {
                   trainer.load(call.folder, call.options);
                   return Json{{"optimizer_steps", trainer.optimizer_steps()}};
                 });
               });
  server.route("POST", "/trainer/publish", [=, &trainer](http::Request, http::Respond respond) {
    post_answer(post, std::move(respond), [&trainer] {
      trainer.publish();
      return Json::object();
    });
  });
  server.route("POST", "/trainer/save_hf",
               [=, &trainer](http::Request request, http::Respond respond) {
                 const auto folder = require<std::string>(parse_json(request.body, "request body"),
                                                          "folder", "request body");
                 post_answer(post, std::move(respond), [=, &trainer] {
                   trainer.save_hf(folder);
                   return Json{{"folder", folder}};
                 });
               });
}

}  // namespace tandem
