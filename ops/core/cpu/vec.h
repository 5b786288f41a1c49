// SIMD vectors (GCC and Clang vector extension) for the instruction set that dispatch_isa.h is
// compiling. +, *, <, ?: work per lane; a * b + c contracts to FMA. No include guard: included once
// per instruction set.

namespace ops::cpu::OPS_ISA {

template <typename A>
constexpr int kLanes = OPS_VECTOR_BYTES / sizeof(A);

// Return whether kernels are specialised for common sizes; double and x86 without AVX2 are not, to
// save compile time.
#if defined(__x86_64__) && OPS_VECTOR_BYTES == 16
template <typename A>
constexpr bool kSpecialised = false;
#else
template <typename A>
constexpr bool kSpecialised = sizeof(A) == 4;
#endif

template <typename A>
using bits_t = std::conditional_t<sizeof(A) == 8, int64_t,
                                  std::conditional_t<sizeof(A) == 4, int32_t, int16_t>>;

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename A, int N>
inline Vec<A, N> broadcast(A x) {
  return x - Vec<A, N>{};
}

// Unaligned loads and stores of N lanes. 16-bit types are converted to float.

template <typename V>
inline V load_bytes(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

template <int N, typename A, typename = std::enable_if_t<std::is_floating_point_v<A>>>
inline Vec<A, N> load(const A* p) {
  return load_bytes<Vec<A, N>>(p);
}

template <int N>
inline Vec<float, N> load(const BFloat16* p) {
  using Wide = Vec<uint32_t, N>;
#if OPS_VECTOR_BYTES == 32
  if constexpr (N == 8) {
    return bit_cast<Vec<float, 8>>(
        bit_cast<Wide>(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p))) << 16);
  }
#elif OPS_VECTOR_BYTES == 64
  if constexpr (N == 16) {
    return bit_cast<Vec<float, 16>>(
        bit_cast<Wide>(_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i*)p)))
        << 16);
  }
#endif
  const auto v = load_bytes<Vec<uint16_t, N>>(p);
  return bit_cast<Vec<float, N>>(__builtin_convertvector(v, Wide) << 16);
}

template <int N>
inline Vec<float, N> load(const Half* p) {
#if OPS_VECTOR_BYTES >= 32
  if constexpr (N == 8) {
    return bit_cast<Vec<float, 8>>(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)));
  } else if constexpr (N == 4) {
    return bit_cast<Vec<float, 4>>(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)));
  }
#if OPS_VECTOR_BYTES == 64
  if constexpr (N == 16) {
    return bit_cast<Vec<float, 16>>(
        _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p)));
  }
#endif
#endif
  Vec<float, N> v;
  for (int i = 0; i < N; ++i) {
    v[i] = p[i];
  }
  return v;
}

template <int N, typename A, typename = std::enable_if_t<std::is_floating_point_v<A>>>
inline void store(A* p, Vec<A, N> v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

// Round to nearest even. A NaN becomes all ones: rounding its payload could overflow to 0.
template <int N>
inline void store(BFloat16* p, Vec<float, N> v) {
  const auto bits = bit_cast<Vec<uint32_t, N>>(v);
  Vec<uint32_t, N> sum = bits + 0x7fff + ((bits >> 16) & 1);
#if OPS_VECTOR_BYTES == 64
  sum = v == v ? sum : ~Vec<uint32_t, N>{};  // a masked addition
#else
  sum |= bit_cast<Vec<uint32_t, N>>(v != v);
#endif
  const Vec<uint32_t, N> rounded = sum >> 16;
#if OPS_VECTOR_BYTES == 32
  if constexpr (N == 8) {
    const __m256i r = bit_cast<__m256i>(rounded);
    return _mm_storeu_si128(
        (__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
  }
#endif
  const Vec<uint16_t, N> half = __builtin_convertvector(rounded, Vec<uint16_t, N>);
  __builtin_memcpy(p, &half, sizeof(half));
}

template <int N>
inline void store(Half* p, Vec<float, N> v) {
#if OPS_VECTOR_BYTES >= 32
  if constexpr (N == 8) {
    return _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(bit_cast<__m256>(v), 0));
  } else if constexpr (N == 4) {
    return _mm_storel_epi64((__m128i*)p, _mm_cvtps_ph(bit_cast<__m128>(v), 0));
  }
#if OPS_VECTOR_BYTES == 64
  if constexpr (N == 16) {
    return _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtps_ph(0xffff, bit_cast<__m512>(v), 0));
  }
#endif
#endif
  for (int i = 0; i < N; ++i) {
    p[i] = v[i];
  }
}

// Load min(n, N) lanes, the others zero; or store them.
template <int N, typename T>
inline Vec<acc_t<T>, N> load_first(const T* p, int64_t n) {
  if (n >= N) {
    return load<N>(p);
  }
  T lanes[N] = {};
  __builtin_memcpy(lanes, p, n * sizeof(T));
  return load<N>(lanes);
}

template <int N, typename T>
inline void store_first(T* p, Vec<acc_t<T>, N> v, int64_t n) {
  if (n >= N) {
    return store<N>(p, v);
  }
  T lanes[N];
  store<N>(lanes, v);
  __builtin_memcpy(p, lanes, n * sizeof(T));
}

// Convert n < 2 N elements, in vectors of N, N / 2, … lanes.
template <int N, typename From, typename To>
inline void convert_some(const From* from, To* to, int64_t n) {
  if (n & N) {
    store<N>(to, load<N>(from));
    from += N;
    to += N;
  }
  if constexpr (N > 1) {
    convert_some<N / 2>(from, to, n);
  }
}

// Convert n elements. The last vector overlaps the one before it.
template <typename From, typename To>
void convert_row(const From* from, To* to, int64_t n) {
  constexpr int N = kLanes<acc_t<From>>;
  if (n < N) {
    convert_some<(N + 1) / 2>(from, to, n);
    return;
  }
  for (int64_t i = 0; i + N <= n; i += N) {
    store<N>(to + i, load<N>(from + i));
  }
  store<N>(to + n - N, load<N>(from + n - N));
}

// Select lanes I... of the concatenation (a, b).
template <typename A, int N, int... I>
inline Vec<A, N> shuffle(Vec<A, N> a, Vec<A, N> b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Vec<bits_t<A>, N>{I...});
#endif
}

// One transposition step: swap the off-diagonal S × S blocks of each 2 S × 2 S block.
template <typename A, int N, int S, int... I>
inline void transpose_squares(Vec<A, N>* rows, std::integer_sequence<int, I...>) {
  OPS_UNROLL
  for (int r = 0; r < N; ++r) {
    if ((r & S) == 0) {
      const Vec<A, N> a = rows[r], b = rows[r + S];
      rows[r] = shuffle<A, N>(a, b, std::integer_sequence<int, (I & S ? N + I - S : I)...>{});
      rows[r + S] = shuffle<A, N>(a, b, std::integer_sequence<int, (I & S ? N + I : I + S)...>{});
    }
  }
}

// Transpose N rows of N lanes in place.
template <typename A, int N, int S = 1>
inline void transpose(Vec<A, N>* rows) {
  if constexpr (S < N) {
    transpose_squares<A, N, S>(rows, std::make_integer_sequence<int, N>{});
    transpose<A, N, 2 * S>(rows);
  }
}

// Return &Kernel::run<n>; 1 ≤ n ≤ MAX.
template <typename Kernel, int MAX>
auto kernel_of(int64_t n) {
  if constexpr (MAX > 1) {
    if (n < MAX) {
      return kernel_of<Kernel, MAX - 1>(n);
    }
  }
  return &Kernel::template run<MAX>;
}

}  // namespace ops::cpu::OPS_ISA
