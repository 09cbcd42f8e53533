// Ranks as child processes of the driver. See cluster.h.
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "base/pipe.h"
#include "base/text.h"
#include "cluster/cluster.h"

namespace tandem {
namespace {

constexpr int kAnnounceFd = 3;
constexpr int kLifelineFd = 4;
constexpr std::size_t kQuotedLines = 15;
constexpr std::size_t kMaxAnnouncementBytes = 64 << 10;
constexpr double kInputSeconds = 60;  // to take the config
constexpr double kTerminateSeconds = 2;

struct LocalRank {
  RankHandle handle;
  Process process;
  Fd announce;  // closed once announced
  Fd lifeline;
  std::string announced;  // what came so far
  std::string log_path;
  bool reported = false;  // its death
};

class LocalCluster : public Cluster {
 public:
  explicit LocalCluster(const std::string& run_folder) : logs_folder_(run_folder + "/logs") {
    create_folders(logs_folder_);
  }
  ~LocalCluster() override { stop(Deadline::after(0)); }

  RankHandle start(const RankSpec& spec) override;
  std::vector<RankHandle> wait_ready(Deadline deadline) override;
  std::vector<RankDeath> deaths(Deadline deadline) override;
  void stop(Deadline deadline) override;

 private:
  static std::string name(const LocalRank& rank);
  static RankDeath death(const LocalRank& rank, const ProcessExit& exit);
  std::string missing() const;
  void wait_for_news(Deadline deadline);
  static void read_announcement(LocalRank& rank);

  std::string logs_folder_;
  std::deque<LocalRank> ranks_;
};

std::string LocalCluster::name(const LocalRank& rank) {
  return fmt::format("rank {} (pid {} on {})", rank.handle.rank, rank.handle.pid, rank.handle.host);
}

RankDeath LocalCluster::death(const LocalRank& rank, const ProcessExit& exit) {
  std::string text = fmt::format("{}: {}", name(rank), exit.describe());
  if (exit.signal == SIGKILL) text += "; if nobody killed it, the machine ran out of memory";
  const std::string lines = read_last_lines(rank.log_path, kQuotedLines);
  if (lines.empty()) {
    text += fmt::format("; its log {} is empty", rank.log_path);
  } else {
    text += fmt::format("; the last lines of {}:", rank.log_path);
    for (const std::string_view line : split(trim(lines), '\n')) {
      text += fmt::format("\n  | {}", one_line(line, 500));
    }
  }
  return {rank.handle.rank, exit, std::move(text)};
}

RankHandle LocalCluster::start(const RankSpec& spec) {
  TD_CHECK(spec.token.find('\n') == std::string::npos, "token: a newline in it");
  PipeEnds announce = make_pipe();
  PipeEnds lifeline = make_pipe();
  SpawnOptions options;
  options.argv = spec.argv;
  for (const auto& [flag, fd] :
       {std::pair("--announce-fd", kAnnounceFd), std::pair("--lifeline-fd", kLifelineFd)}) {
    options.argv.emplace_back(flag);
    options.argv.push_back(std::to_string(fd));
  }
  options.env = spec.env;
  options.in = Stream::pipe;
  options.out = options.err = Stream::log;
  options.log_path = fmt::format("{}/rank_{}.log", logs_folder_, spec.rank);
  options.pass_fds = {{announce.write.get(), kAnnounceFd}, {lifeline.read.get(), kLifelineFd}};

  Process process = Process::spawn(options);
  RankHandle handle{spec.rank, "localhost", process.pid(), {"127.0.0.1", 0, spec.token}, {}};
  ranks_.push_back({std::move(handle), std::move(process), std::move(announce.read),
                    std::move(lifeline.write), "", options.log_path, false});
  LocalRank& rank = ranks_.back();
  // A rank that closes its input early has a reason to say in its log: wait_ready will quote it.
  const PipeState state = write_bytes(rank.process.in().get(), spec.token + "\n" + spec.config,
                                      Deadline::after(kInputSeconds));
  rank.process.in().close();
  TD_CHECK(state != PipeState::timed_out, "{}: did not read its config within {}", name(rank),
           human_seconds(kInputSeconds));
  return rank.handle;
}

// Takes what has come on the announce pipe.
void LocalCluster::read_announcement(LocalRank& rank) {
  pollfd entry{rank.announce.get(), POLLIN, 0};
  if (!rank.announce || ::poll(&entry, 1, 0) <= 0) return;
  char buffer[4096];
  const ssize_t n = ::read(rank.announce.get(), buffer, sizeof buffer);
  if (n < 0 && errno == EINTR) return;
  if (n <= 0) {
    rank.announce.close();  // it is dying, or closed it: either is seen elsewhere
    return;
  }
  rank.announced.append(buffer, static_cast<std::size_t>(n));
  const std::size_t newline = rank.announced.find('\n');
  if (newline == std::string::npos) {
    TD_CHECK(rank.announced.size() < kMaxAnnouncementBytes, "{}: announced more than {} bytes",
             name(rank), kMaxAnnouncementBytes);
    return;
  }
  const std::string line = rank.announced.substr(0, newline);
  TD_CHECK(line.starts_with("ready "), "{}: announced '{}', wanted 'ready {{…}}'", name(rank),
           one_line(line, 100));
  const std::string where = name(rank) + ": announcement";
  rank.handle.announcement = parse_json(line.substr(6), where);
  rank.handle.address.port = require<int>(rank.handle.announcement, "port", where);
  rank.handle.address.host =
      optional_key<std::string>(rank.handle.announcement, "host", where, rank.handle.address.host);
  rank.announce.close();
}

std::string LocalCluster::missing() const {
  std::string names;
  for (const LocalRank& rank : ranks_) {
    if (rank.handle.address.port == 0) names += (names.empty() ? "" : ", ") + name(rank);
  }
  return names;
}

// Until a rank announces something or ends.
void LocalCluster::wait_for_news(Deadline deadline) {
  std::vector<pollfd> entries;
  for (LocalRank& rank : ranks_) {
    if (rank.announce) entries.push_back({rank.announce.get(), POLLIN, 0});
    if (rank.process.pidfd() >= 0) entries.push_back({rank.process.pidfd(), POLLIN, 0});
  }
  ::poll(entries.data(), entries.size(), deadline.poll_milliseconds());
}

std::vector<RankHandle> LocalCluster::wait_ready(Deadline deadline) {
  for (;;) {
    for (LocalRank& rank : ranks_) read_announcement(rank);
    for (RankDeath& death : deaths(Deadline::after(0))) throw Error(death.text);
    const std::string names = missing();
    if (names.empty()) break;
    TD_CHECK(!deadline.expired(), "{}: not ready within {}; see {}", names, deadline.describe(),
             logs_folder_);
    wait_for_news(deadline);
  }
  std::vector<RankHandle> handles;
  for (const LocalRank& rank : ranks_) handles.push_back(rank.handle);
  return handles;
}

std::vector<RankDeath> LocalCluster::deaths(Deadline deadline) {
  for (;;) {
    std::vector<RankDeath> found;
    for (LocalRank& rank : ranks_) {
      const auto exit = rank.process.try_wait();
      if (exit && !std::exchange(rank.reported, true)) found.push_back(death(rank, *exit));
    }
    if (!found.empty() || deadline.expired()) return found;
    std::vector<pollfd> entries;
    for (const LocalRank& rank : ranks_) {
      if (rank.process.pidfd() >= 0) entries.push_back({rank.process.pidfd(), POLLIN, 0});
    }
    ::poll(entries.data(), entries.size(), deadline.poll_milliseconds());
  }
}

void LocalCluster::stop(Deadline deadline) {
  for (auto rank = ranks_.rbegin(); rank != ranks_.rend(); ++rank) rank->lifeline.close();
  for (auto rank = ranks_.rbegin(); rank != ranks_.rend(); ++rank) {
    if (rank->process.wait(deadline)) continue;
    rank->process.signal_group(SIGTERM);
  }
  const Deadline terminated = Deadline::after(kTerminateSeconds);
  for (auto rank = ranks_.rbegin(); rank != ranks_.rend(); ++rank) {
    if (rank->process.wait(terminated)) continue;
    TD_LOG(warn, "{}: did not end on its own; killed", name(*rank));
    rank->process.terminate(0);
  }
  ranks_.clear();
}

}  // namespace

std::unique_ptr<Cluster> make_local_cluster(const std::string& run_folder) {
  return std::make_unique<LocalCluster>(run_folder);
}

}  // namespace tandem
