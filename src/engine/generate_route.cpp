// One call of /generate; see the header for who does what.
#include "engine/generate_route.h"

#include "base/check.h"

namespace tandem {
namespace {

constexpr const char* kEvents = "text/event-stream";

std::string event(const Json& json) { return "data: " + dump_json(json) + "\n\n"; }

}  // namespace

// One HTTP request of several prompts. After start() only the thread `texts_` touches it.
struct GenerateRoute::Pending {
  GenerateCall call;
  http::Respond respond;
  std::vector<GenerateResult> results;  // [prompts]
  std::size_t missing = 0;
  // Of a stream: what each sample has so far, [prompts, n].
  std::vector<std::vector<SampleResult>> so_far;
  std::vector<std::vector<std::string>> bytes;
};

GenerateRoute::GenerateRoute(Mailbox& mailbox, EngineLimits limits, TextHooks text,
                             std::uint64_t default_seed)
    : mailbox_(mailbox), limits_(std::move(limits)), text_(std::move(text)) {
  names_.default_seed = default_seed;
}

void GenerateRoute::serve(const http::Request& request, const http::Respond& respond) {
  Json body = parse_json(request.body, "body");
  if (!body.is_object() || !body.contains("text") || text_.encode == nullptr) {
    return start(body, respond);
  }
  texts_.post([this, respond, body = std::move(body)] {
    http::guarded(respond, [&] { start(body, respond); });
  });
}

void GenerateRoute::start(const Json& body, const http::Respond& respond) {
  auto pending = std::make_shared<Pending>(Pending{.call = parse_generate(body, text_, names_),
                                                   .respond = respond,
                                                   .results = {},
                                                   .missing = 0,
                                                   .so_far = {},
                                                   .bytes = {}});
  // All are checked before any is posted: a batch is refused whole.
  const std::vector<GenerateRequest>& requests = pending->call.requests;
  for (const GenerateRequest& item : requests) check_request(item, limits_);
  pending->missing = requests.size();
  pending->results.resize(requests.size());
  if (pending->call.stream) {
    for (const GenerateRequest& item : requests) {
      pending->so_far.emplace_back(static_cast<std::size_t>(item.n));
      pending->bytes.emplace_back(static_cast<std::size_t>(item.n));
    }
  }
  const std::uint64_t first_ticket = next_ticket_.fetch_add(requests.size());
  // The copy of `respond` in `pending` keeps the connection's answer open until the last result.
  for (std::size_t i = 0; i < requests.size(); ++i) {
    mailbox_.post(command(pending, i, first_ticket + i));
  }
  // After what it cancels: a client that has gone already is told at once.
  respond.on_gone([this, first_ticket, count = requests.size()] {
    for (std::size_t i = 0; i < count; ++i) mailbox_.post(CancelCommand{first_ticket + i});
  });
}

GenerateCommand GenerateRoute::command(std::shared_ptr<Pending> pending, std::size_t i,
                                       std::uint64_t ticket) {
  GenerateCommand made{.request = pending->call.requests[i], .on_finish = {}, .ticket = ticket};
  made.on_finish = [this, pending, i](GenerateResult result) {
    texts_.post([this, pending, i, result = std::move(result)]() mutable {
      finish(pending, i, std::move(result));
    });
  };
  if (pending->call.stream) {
    made.on_token = [this, pending, i](std::int64_t index, TokenId token, float log_prob,
                                       std::int64_t version) {
      texts_.post([=, this] { show_token(*pending, i, index, token, log_prob, version); });
    };
  }
  return made;
}

void GenerateRoute::finish(const std::shared_ptr<Pending>& pending, std::size_t i,
                           GenerateResult result) {
  const http::Respond& respond = pending->respond;
  pending->results[i] = std::move(result);
  const bool last = --pending->missing == 0;
  try {
    if (pending->call.stream) {
      const GenerateResult& done = pending->results[i];
      for (std::size_t s = 0; s < done.samples.size(); ++s) {
        respond.write(event(sample_answer(pending->call, i, done, s, text_)), kEvents);
      }
      if (!last) return;
      respond.write("data: [DONE]\n\n", kEvents);
      respond.end();
    } else if (last) {
      respond({.body = dump_json(generate_answer(pending->call, pending->results, text_))});
    }
  } catch (const Error& e) {  // an answer that cannot be decoded ends that request alone
    respond(http::error_response(500, e.what()));
  }
}

void GenerateRoute::show_token(Pending& pending, std::size_t i, std::int64_t index, TokenId token,
                               float log_prob, std::int64_t version) {
  SampleResult& sample = pending.so_far[i][index];
  std::string& bytes = pending.bytes[i][index];
  sample.output_ids.push_back(token);
  sample.log_probs.push_back(log_prob);
  sample.versions.push_back(version);
  std::optional<std::string_view> text;
  if (const Vocabulary* vocabulary = limits_.vocabulary.get()) {
    const bool hidden = pending.call.skip_special_tokens && vocabulary->is_special(token);
    std::string_view piece = hidden ? std::string_view() : vocabulary->bytes(token);
    if (bytes.empty() && vocabulary->strips_first_space() && piece.starts_with(' ')) {
      piece.remove_prefix(1);
    }
    bytes += piece;
    text = std::string_view(bytes).substr(0, whole_characters(bytes));
  }
  pending.respond.write(
      event(partial_answer(pending.call, i, sample, static_cast<std::size_t>(index), text)),
      kEvents);
}

}  // namespace tandem
