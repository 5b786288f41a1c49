// Vector kernels of CPU ncrelu. Results are bitwise ANDs of the input: NaN payloads are preserved.
// No include guard: see core/cpu/dispatch_isa.h.
//
//   x       ┌──────────────┐   masks           out ┌─────────────────┬─────────────────┐
//   (a row) │ N lanes      │ ────────────────►     │ x & ~(x < 0)    │ x & ~(x > 0)    │
//           └──────────────┘   │                   └─────────────────┴─────────────────┘
//                              └─► a byte per element: [x > 0] + 2 [x < 0] ─► signs, 4 per byte

namespace ops::cpu::OPS_ISA::ncrelu {

using ops::ncrelu::kMaxBlock;
using ops::ncrelu::kSignsPerByte;

// Lanes of a vector, at most 16.
template <typename T>
constexpr int kElements = OPS_VECTOR_BYTES / sizeof(T) < 16 ? OPS_VECTOR_BYTES / sizeof(T) : 16;

template <int N, typename T>
inline Vec<bits_t<T>, N> load_bits(const T* p) {
  return load_bytes<Vec<bits_t<T>, N>>(p);
}

template <int N, typename T>
inline void store_bits(T* p, Vec<bits_t<T>, N> bits) {
  __builtin_memcpy(static_cast<void*>(p), &bits, sizeof(bits));
}

// Masks of the lanes > 0 and < 0: all bits of a lane set, or none.
template <typename T, int N>
struct Masks {
  Vec<bits_t<T>, N> positive, negative;
};

template <int N, typename T>
inline Masks<T, N> masks_of(const T* x) {
  if constexpr (sizeof(T) == 2) {  // compare as integers: positive floats order like their bits
    constexpr int16_t kZero = 0, kInfinity = std::is_same_v<T, Half> ? 0x7c00 : 0x7f80;
    const Vec<int16_t, N> bits = load_bits<N>(x), opposite = bits ^ int16_t(-0x8000);
    return {(bits > kZero) & (bits <= kInfinity), (opposite > kZero) & (opposite <= kInfinity)};
  } else {
    const Vec<T, N> v = load<N>(x);
    return {v > T(0), v < T(0)};
  }
}

// Return the masks of N lanes from their 2 N sign bits. A lane of 16 bits has room for those of 8
// elements: the lower lanes test the first 16 bits.
template <typename T, int... I>
inline auto expand(uint64_t packed, std::integer_sequence<int, I...>) {
  using Bits = bits_t<T>;
  constexpr int N = sizeof...(I), kLaneBits = 8 * sizeof(T);
  Vec<Bits, N> all;
  if constexpr (2 * N <= kLaneBits) {
    all = broadcast<Bits, N>(packed);
  } else {
    all = bit_cast<Vec<Bits, N>>(broadcast<int32_t, N / 2>(packed));
    all = shuffle<Bits, N>(all, all, std::integer_sequence<int, (I < N / 2 ? 0 : N / 2 + 1)...>{});
  }
  const Vec<Bits, N> first{static_cast<Bits>(uint64_t{1} << 2 * I % kLaneBits)...};
  const Vec<Bits, N> second{static_cast<Bits>(uint64_t{2} << 2 * I % kLaneBits)...};
  return Masks<T, N>{(all & first) != 0, (all & second) != 0};
}

// Unpack the masks of N elements from i on.
template <int N, typename T>
inline Masks<T, N> unpack(const uint8_t* signs, uint64_t i) {
  constexpr int kBytes = (N + kSignsPerByte - 1) / kSignsPerByte;
  uint64_t packed = 0;
  __builtin_memcpy(&packed, signs + i / kSignsPerByte, kBytes);
  packed |= uint64_t{signs[(i + N - 1) / kSignsPerByte]} << 8 * kBytes;
  packed >>= 2 * (i % kSignsPerByte);
  return expand<T>(packed, std::make_integer_sequence<int, N>{});
}

// Pack the signs of n elements, a byte each, into four per byte.
inline void pack(const uint8_t* unpacked, int64_t n, uint8_t* packed) {
  for (int64_t byte = 0; byte * kSignsPerByte < n; ++byte) {
    const auto four = load_bytes<uint32_t>(unpacked + byte * kSignsPerByte);
    packed[byte] = four | four >> 6 | four >> 12 | four >> 18;
  }
}

// Call f(count, row, i) for vectors i, … of `count` elements that cover [begin, end); `row` is the
// first element of their row. f must write in ascending order: in rows of less than a vector, the
// vector exceeds the row, and the next row overwrites the excess. In longer rows, the last vector
// overlaps the one before. The rest are single elements.
template <int N, typename F>
inline void for_each_vector(int64_t begin, int64_t end, int64_t inner, const F& f) {
  using Vector = std::integral_constant<int, N>;
  for (; inner < N && begin + N <= end; begin += inner) {
    f(Vector{}, begin, begin);
  }
  for (int64_t row = begin / inner * inner; begin < end; row += inner) {
    const int64_t stop = row + inner < end ? row + inner : end;
    if (begin + N <= stop) {
      for (; begin + N <= stop; begin += N) {
        f(Vector{}, row, begin);
      }
      if (begin < stop) {
        f(Vector{}, row, stop - N);
        begin = stop;
      }
    }
    for (; begin < stop; ++begin) {
      f(std::integral_constant<int, 1>{}, row, begin);
    }
  }
}

// Write both halves of elements [begin, end), and with kSigns their signs: begin is then a multiple
// of kSignsPerByte. Both halves propagate NaN, as torch.clamp does.
template <bool kSigns, typename T>
void split(const T* x, T* out, uint8_t* signs, int64_t begin, int64_t end, int64_t inner) {
  uint8_t unpacked[kMaxBlock];
  for_each_vector<kElements<T>>(begin, end, inner, [=, &unpacked](auto n, int64_t row, int64_t i) {
    constexpr int N = decltype(n)::value;
    T* positive = out + row + i;
    const Masks<T, N> masks = masks_of<N>(x + i);
    const Vec<bits_t<T>, N> bits = load_bits<N>(x + i);
    store_bits<N>(positive, bits & ~masks.negative);
    store_bits<N>(positive + inner, bits & ~masks.positive);
    if constexpr (kSigns) {
      const auto lanes = (masks.positive & 1) | (masks.negative & 2);
      const auto bytes = __builtin_convertvector(lanes, Vec<uint8_t, N>);
      __builtin_memcpy(unpacked + (i - begin), &bytes, N);
    }
  });
  if constexpr (kSigns) {
    __builtin_memset(unpacked + (end - begin), 0, (begin - end) & (kSignsPerByte - 1));
    pack(unpacked, end - begin, signs + begin / kSignsPerByte);
  }
}

// out = g₊ [x > 0] + g₋ [x < 0]
template <typename T>
void merge(const T* grad, const uint8_t* signs, T* out, int64_t begin, int64_t end, int64_t inner) {
  for_each_vector<kElements<T>>(begin, end, inner, [=](auto n, int64_t row, int64_t i) {
    constexpr int N = decltype(n)::value;
    const T* positive = grad + row + i;
    const Masks<T, N> x = unpack<N, T>(signs, i);
    store_bits<N>(out + i, (load_bits<N>(positive) & x.positive) |
                               (load_bits<N>(positive + inner) & x.negative));
  });
}

}  // namespace ops::cpu::OPS_ISA::ncrelu
