// Binds the tables to objects: the one place where the typed walk is instantiated.
#include "config/flags.h"

namespace tandem {
namespace {

template <class E>
std::string_view spelling(E value) {
  return names<E>[static_cast<std::size_t>(value)];
}

}  // namespace

std::vector<FlagRow> rows_of(Config& config) { return bind_rows(config); }
std::vector<FlagRow> rows_of(GenerateConfig& config) { return bind_rows(config); }
std::vector<FlagRow> rows_of(ScoreConfig& config) { return bind_rows(config); }
std::vector<FlagRow> rows_of(SelftestConfig& config) { return bind_rows(config); }
std::vector<FlagRow> rows_of(ServeConfig& config) { return bind_rows(config); }

std::string_view name_of(Device value) { return spelling(value); }
std::string_view name_of(ComputeDtype value) { return spelling(value); }
std::string_view name_of(CpuKernels value) { return spelling(value); }
std::string_view name_of(AdvantageEstimator value) { return spelling(value); }
std::string_view name_of(KlLossType value) { return spelling(value); }
std::string_view name_of(LrDecayStyle value) { return spelling(value); }
std::string_view name_of(TrainBackend value) { return spelling(value); }
std::string_view name_of(TransferMode value) { return spelling(value); }
std::string_view name_of(LogLevel value) { return spelling(value); }

}  // namespace tandem
