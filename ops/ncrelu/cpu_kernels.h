// Vector kernels of CPU ncrelu. Results are bitwise ANDs of the input: NaN payloads are preserved.
// No include guard: see core/cpu/dispatch_isa.h.
//
//   x       ┌──────────────┐   sign masks      out ┌─────────────────┬─────────────────┐
//   (a row) │ N lanes      │ ────────────────►     │ x & ~(x < 0)    │ x & ~(x > 0)    │
//           └──────────────┘   packed: signs       └─────────────────┴─────────────────┘
//
//   thread:  a range of elements (long rows) or of rows (short rows)
//   lanes:   adjacent elements of a row

namespace ops::cpu::OPS_ISA {

// Lanes of a vector, at most 16: two sign bits each fill 32 bits.
template <typename T>
constexpr int kElements = OPS_VECTOR_BYTES / sizeof(T) < 16 ? OPS_VECTOR_BYTES / sizeof(T) : 16;

// Lanes of a loop: whole bytes of signs.
template <typename T>
constexpr int kVector = kElements<T> > kSignsPerByte ? kElements<T> : kSignsPerByte;

template <int N, typename T>
inline Vec<bits_t<T>, N> load_bits(const T* p) {
  Vec<bits_t<T>, N> bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return bits;
}

template <int N, typename T>
inline void store_bits(T* p, Vec<bits_t<T>, N> bits) {
  __builtin_memcpy(static_cast<void*>(p), &bits, sizeof(bits));
}

// Masks of the lanes > 0 and < 0: all bits of a lane set, or none.
template <typename T, int N>
struct SignMasks {
  Vec<bits_t<T>, N> positive, negative;
};

// Return the masks of N elements from i on: computed from the input.
template <int N, typename T>
inline SignMasks<T, N> sign_masks(const T* x, uint64_t i) {
  if constexpr (sizeof(T) == 2) {  // compare as integers: positive floats order like their bits
    constexpr int16_t kZero = 0, kInfinity = std::is_same_v<T, Half> ? 0x7c00 : 0x7f80;
    const Vec<int16_t, N> bits = load_bits<N>(x + i), opposite = bits ^ int16_t(-0x8000);
    return {(bits > kZero) & (bits <= kInfinity), (opposite > kZero) & (opposite <= kInfinity)};
  } else {
    const Vec<T, N> v = load<N>(x + i);
    return {v > T(0), v < T(0)};
  }
}

template <typename T, int N, int... I>
inline SignMasks<T, N> expand_signs(uint64_t signs, std::integer_sequence<int, I...>) {
  using Bits = std::make_unsigned_t<bits_t<T>>;
  constexpr int kBits = 8 * sizeof(T);  // of a lane, which holds all or half of the signs
  static_assert(N <= kBits);
  Vec<Bits, N> all;
  if constexpr (2 * N <= kBits) {
    all = broadcast<Bits, N>(signs);
  } else {
    all = bit_cast<Vec<Bits, N>>(broadcast<uint32_t, N / 2>(signs));
    all = shuffle<Bits, N>(all, all, std::integer_sequence<int, (I < N / 2 ? 0 : N / 2 + 1)...>{});
  }
  const Vec<Bits, N> first{static_cast<Bits>(uint64_t{1} << 2 * I % kBits)...};
  const Vec<Bits, N> second{static_cast<Bits>(uint64_t{2} << 2 * I % kBits)...};
  return {(all & first) != 0, (all & second) != 0};
}

// Return the masks of N elements from i on, from the saved signs.
template <int N, typename T>
inline SignMasks<T, N> sign_masks(const uint8_t* signs, uint64_t i) {
  constexpr int kBytes = (N + kSignsPerByte - 1) / kSignsPerByte;
  uint64_t bits = 0;
  __builtin_memcpy(&bits, signs + i / kSignsPerByte, kBytes);
  bits |= uint64_t{signs[(i + N - 1) / kSignsPerByte]} << 8 * kBytes;
  bits >>= 2 * (i % kSignsPerByte);
  return expand_signs<T, N>(bits, std::make_integer_sequence<int, N>{});
}

// Return a mask with bit i = lane i, for N lanes of BYTES bytes that are all ones or all zeros.
template <int BYTES, int N, typename Vector>
inline uint64_t lane_bits(Vector v) {
  static_assert(sizeof(v) == BYTES * N && BYTES <= 4 && (BYTES > 1 || sizeof(v) < 64));
#if defined(__x86_64__)
  if constexpr (sizeof(v) == 16) {
    const auto x = bit_cast<__m128i>(v);
    return BYTES == 1   ? _mm_movemask_epi8(x)
           : BYTES == 2 ? _mm_movemask_epi8(_mm_packs_epi16(x, _mm_setzero_si128()))
                        : _mm_movemask_ps(_mm_castsi128_ps(x));
  }
#endif
#if OPS_VECTOR_BYTES >= 32
  if constexpr (sizeof(v) == 32) {
    const auto x = bit_cast<__m256i>(v);
    const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
    return BYTES == 1   ? static_cast<uint32_t>(_mm256_movemask_epi8(x))
           : BYTES == 2 ? _mm_movemask_epi8(_mm_packs_epi16(low, high))
                        : _mm256_movemask_ps(_mm256_castsi256_ps(x));
  }
#endif
#if OPS_VECTOR_BYTES == 64
  if constexpr (sizeof(v) == 64) {
    const auto x = bit_cast<__m512i>(v);
    return BYTES == 2 ? _mm512_movepi16_mask(x) : _mm512_movepi32_mask(x);
  }
#endif
  const auto bytes = bit_cast<Vec<uint8_t, BYTES * N>>(v);
  uint64_t bits = 0;
  for (int i = 0; i < N; ++i) {
    bits |= uint64_t{bytes[BYTES * i]} >> 7 << i;
  }
  return bits;
}

// Pack masks to two bits per element: a lane's lower half is [x > 0], its upper half [x < 0].
template <int N, typename T>
inline uint64_t pack_signs(const T* x) {
  if constexpr (N > kElements<T>) {
    return pack_signs<N / 2>(x) | pack_signs<N / 2>(x + N / 2) << N;
  } else {
    using Bits = std::make_unsigned_t<bits_t<T>>;
    constexpr int kHalf = 4 * sizeof(T);
    const SignMasks<T, N> masks = sign_masks<N>(x, 0);
    const auto positive = bit_cast<Vec<Bits, N>>(masks.positive);
    const auto negative = bit_cast<Vec<Bits, N>>(masks.negative);
    return lane_bits<sizeof(T) / 2, 2 * N>(positive >> kHalf | negative << kHalf);
  }
}

// Store the signs of elements [begin, end); begin is a multiple of kSignsPerByte.
template <typename T>
void ncrelu_signs(const T* x, uint8_t* signs, int64_t begin, int64_t end) {
  constexpr int N = 16;
  for (; begin + N <= end; begin += N) {
    const uint64_t bits = pack_signs<N>(x + begin);
    __builtin_memcpy(signs + begin / kSignsPerByte, &bits, N / kSignsPerByte);
  }
  for (; begin < end; begin += kSignsPerByte) {
    uint8_t byte = 0;
    for (int i = 0; i < kSignsPerByte && begin + i < end; ++i) {
      byte |= pack_signs<1>(x + begin + i) << 2 * i;
    }
    signs[begin / kSignsPerByte] = byte;
  }
}

// Call f(count, row, i) for vectors i, … of `count` elements that cover [begin, end); `row` is the
// first element of their row. f must write in ascending order: in rows of less than a vector, the
// vector exceeds the row, and the next row overwrites the excess. In longer rows, the last vector
// overlaps the one before. The rest are quads, or single elements.
template <int N, typename F>
inline void for_each_vector(int64_t begin, int64_t end, int64_t inner, const F& f) {
  using Vector = std::integral_constant<int, N>;
  for (; inner < N && begin + N <= end; begin += inner) {
    f(Vector{}, begin, begin);
  }
  for (int64_t row = begin / inner * inner; begin < end; row += inner) {
    const int64_t first = begin, stop = row + inner < end ? row + inner : end;
    for (; begin + N <= stop; begin += N) {
      f(Vector{}, row, begin);
    }
    if (begin == stop) {
      continue;
    }
    if (begin > first) {
      f(Vector{}, row, stop - N);
      begin = stop;
    }
    for (; begin + kSignsPerByte <= stop; begin += kSignsPerByte) {
      f(std::integral_constant<int, kSignsPerByte>{}, row, begin);
    }
    for (; begin < stop; ++begin) {
      f(std::integral_constant<int, 1>{}, row, begin);
    }
  }
}

// Write both halves of elements [begin, end); both propagate NaN, as torch.clamp does. `signs`, if
// not null, receives the signs; then begin, end and inner are multiples of kSignsPerByte.
template <typename T, typename Signs>
void ncrelu_forward(const T* x, T* out, Signs signs, int64_t begin, int64_t end, int64_t inner) {
  for_each_vector<kVector<T>>(begin, end, inner, [=](auto n, int64_t row, int64_t i) {
    constexpr int N = decltype(n)::value;
    T* positive = out + row + i;
    const SignMasks<T, N> masks = sign_masks<N>(x, i);
    const Vec<bits_t<T>, N> bits = load_bits<N>(x + i);
    store_bits<N>(positive, bits & ~masks.negative);
    store_bits<N>(positive + inner, bits & ~masks.positive);
    if constexpr (std::is_pointer_v<Signs> && N % kSignsPerByte == 0) {
      const uint64_t packed = pack_signs<N>(x + i);
      __builtin_memcpy(signs + i / kSignsPerByte, &packed, N / kSignsPerByte);
    }
  });
}

// out = g₊ [x > 0] + g₋ [x < 0]. `source`: the input or its signs.
template <typename T, typename Source>
void ncrelu_backward(const Source* source, const T* grad, T* out, int64_t begin, int64_t end,
                     int64_t inner) {
  for_each_vector<kVector<T>>(begin, end, inner, [=](auto n, int64_t row, int64_t i) {
    constexpr int N = decltype(n)::value;
    const T* positive = grad + row + i;
    const SignMasks<T, N> x = sign_masks<N, T>(source, i);
    store_bits<N>(out + i, (load_bits<N>(positive) & x.positive) |
                               (load_bits<N>(positive + inner) & x.negative));
  });
}

}  // namespace ops::cpu::OPS_ISA
