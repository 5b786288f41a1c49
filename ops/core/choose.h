// Choice of a launch plan: candidates are offered with their cost, the cheapest one is kept.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace ops {

// The candidate with the least cost; of equal ones the first.
template <typename T>
class Cheapest {
 public:
  void offer(const T& candidate, double cost) {
    if (!best_ || cost < cost_) {
      best_ = candidate, cost_ = cost;
    }
  }
  // Return the cheapest candidate; nullopt if none was offered.
  const std::optional<T>& best() const { return best_; }

 private:
  std::optional<T> best_;
  double cost_ = 0;
};

// Return the number of splits of work with the least time, in waves × steps. Each of `blocks`
// blocks has `steps` steps; `resident` blocks run at once (all three at least 1); a split costs
// `extra` more steps.
inline int64_t choose_splits(int64_t steps, int64_t blocks, int64_t resident, int64_t extra) {
  constexpr int64_t kMaxWaves = 16;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t min_waves = ceil_div(blocks, resident);
  Cheapest<int64_t> splits;
  for (int64_t waves = min_waves; waves < min_waves + kMaxWaves; ++waves) {
    const int64_t most = std::max<int64_t>(1, std::min(steps, waves * resident / blocks));
    const int64_t length = ceil_div(steps, most), count = ceil_div(steps, length);
    splits.offer(count, ceil_div(blocks * count, resident) * (length + extra));
  }
  return *splits.best();
}

}  // namespace ops
