// Routes of the engine's HTTP face; the JSON of /generate is in wire.cpp.
#include "engine/serve.h"

#include <memory>

#include "base/check.h"
#include "engine/generate_route.h"

namespace tandem {
namespace {

// What the handlers share; lives as long as the server's routes.
struct Face {
  Face(Mailbox& box, ServeOptions serve_options)
      : mailbox(box),
        options(std::move(serve_options)),
        generate(box, options.limits, options.text, options.default_seed) {}
  Mailbox& mailbox;
  ServeOptions options;
  GenerateRoute generate;
};

// A body that may be left out.
Json read_body(const http::Request& request) {
  if (request.body.empty()) return Json::object();
  Json body = parse_json(request.body, "body");
  TD_CHECK(body.is_object(), "body: {} found, wanted a JSON object", body.type_name());
  return body;
}

void answer_json(const http::Respond& respond, const Json& json) {
  respond({.body = dump_json(json)});
}

// Control commands answer {"message", "status"} or 400 with the reason.
ControlReply control_reply(http::Respond respond) {
  return [respond = std::move(respond)](const ControlAnswer& answer) {
    if (!answer.ok) return respond(http::error_response(400, answer.message));
    answer_json(respond, {{"message", answer.message}, {"status", "ok"}});
  };
}

PauseMode read_pause_mode(const Json& body) {
  const auto mode = optional_key<std::string>(body, "mode", "body", "abort");
  if (mode == "abort") return PauseMode::abort;
  if (mode == "retract") return PauseMode::retract;
  TD_CHECK(mode == "in_place", "mode: '{}' found, wanted abort, retract or in_place", mode);
  return PauseMode::in_place;
}

void abort_request(Face& face, const http::Request& request, const http::Respond& respond) {
  const Json body = read_body(request);
  const auto all = optional_key<bool>(body, "abort_all", "body", false);
  auto prefix = optional_key<std::string>(body, "rid", "body", "");
  TD_CHECK(all || !prefix.empty(),
           "rid: empty; name the request (all whose rid begins so), or send abort_all: true");
  if (all) prefix.clear();
  face.mailbox.post(AbortCommand{std::move(prefix), [respond](const ControlAnswer&) {
                                   respond({.content_type = "text/plain"});
                                 }});
}

void flush_cache(Face& face, const http::Respond& respond) {
  face.mailbox.post(FlushCommand{[respond](const ControlAnswer& answer) {
    if (!answer.ok) return respond(http::error_response(400, answer.message));
    respond({.body = answer.message + "\n", .content_type = "text/plain"});
  }});
}

Json model_info(const Face& face) {
  return {{"model_path", face.options.model_path},
          {"tokenizer_path", face.options.model_path},
          {"is_generation", true},
          {"preferred_sampling_params", nullptr},
          {"weight_version", std::to_string(face.mailbox.stats().weight_version)},
          {"model_type", face.options.model_type},
          {"architectures", face.options.architectures}};
}

Json server_info(const Face& face) {
  const EngineLimits& limits = face.options.limits;
  const EngineStats stats = face.mailbox.stats();
  const Json state = {{"num_running", stats.running},
                      {"num_waiting", stats.waiting},
                      {"free_blocks", stats.free_blocks},
                      {"total_blocks", stats.total_blocks},
                      {"tokens_sampled", stats.tokens_sampled},
                      {"rows_computed", stats.rows_computed},
                      {"rows_cached", stats.rows_cached},
                      {"cached_blocks", stats.cached_blocks},
                      {"num_retractions", stats.preemptions},
                      {"steps", stats.steps},
                      {"paused", stats.paused}};
  return {{"model_path", face.options.model_path},
          {"tokenizer_path", face.options.model_path},
          {"version", face.options.version},
          {"weight_version", std::to_string(stats.weight_version)},
          {"context_length", limits.context_length},
          {"page_size", limits.block_tokens},
          {"max_total_num_tokens", limits.num_blocks * limits.block_tokens},
          {"max_running_requests", limits.max_running},
          {"max_prefill_tokens", limits.max_prefill_tokens},
          {"internal_states", Json::array({state})}};
}

}  // namespace

void add_engine_routes(http::Server& server, Mailbox& mailbox, ServeOptions options) {
  auto face = std::make_shared<Face>(mailbox, std::move(options));
  using http::Request;
  using http::Respond;
  server.route("POST", "/generate", [face](const Request& request, const Respond& respond) {
    face->generate.serve(request, respond);
  });
  server.route("GET", "/health", [](const Request&, const Respond& respond) {
    respond({.content_type = "text/plain"});
  });
  server.route("GET", "/health_generate", [face](const Request&, const Respond& respond) {
    face->mailbox.post(ProbeCommand{control_reply(respond)});
  });
  server.route("POST", "/pause_generation", [face](const Request& request, const Respond& respond) {
    face->mailbox.post(PauseCommand{read_pause_mode(read_body(request)), control_reply(respond)});
  });
  server.route("POST", "/continue_generation", [face](const Request&, const Respond& respond) {
    face->mailbox.post(ContinueCommand{control_reply(respond)});
  });
  server.route("POST", "/abort_request", [face](const Request& request, const Respond& respond) {
    abort_request(*face, request, respond);
  });
  for (const char* method : {"GET", "POST"}) {
    server.route(method, "/flush_cache",
                 [face](const Request&, const Respond& respond) { flush_cache(*face, respond); });
  }
  for (const char* path : {"/get_model_info", "/model_info"}) {
    server.route("GET", path, [face](const Request&, const Respond& respond) {
      answer_json(respond, model_info(*face));
    });
  }
  for (const char* path : {"/get_server_info", "/server_info"}) {
    server.route("GET", path, [face](const Request&, const Respond& respond) {
      answer_json(respond, server_info(*face));
    });
  }
  server.route("GET", "/get_weight_version", [face](const Request&, const Respond& respond) {
    answer_json(respond,
                {{"weight_version", std::to_string(face->mailbox.stats().weight_version)}});
  });
}

}  // namespace tandem
