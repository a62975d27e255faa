// Sixteen-lane vectors over every instruction set, so that a kernel is written once.
//
// Included inside `namespace hotbatch::HB_ISA` of a translation unit that was compiled for one
// instruction set. A logical vector always has 16 lanes, whatever the registers hold: packed
// layouts are then the same everywhere, and only speed differs. Results may differ between
// instruction sets (fused or split multiply-adds), never between batches on one of them.

#if defined(__AVX512F__)

constexpr int kLanes = 16;
struct vf { __m512 v; };
struct vi { __m512i v; };
using vbytes = __m512i;  // 64 bytes

inline vf zero() { return {_mm512_setzero_ps()}; }
inline vf set1(float x) { return {_mm512_set1_ps(x)}; }
inline vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, vf a) { _mm512_storeu_ps(p, a.v); }
inline vf operator+(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
inline vf operator-(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline vf operator*(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline vf operator/(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
inline vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline vf max(vf a, vf b) { return {_mm512_max_ps(a.v, b.v)}; }
inline vf min(vf a, vf b) { return {_mm512_min_ps(a.v, b.v)}; }
inline vf abs(vf a) { return {_mm512_abs_ps(a.v)}; }
inline vf floor(vf a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
// Lanes below `count` come from `a`, the others from `b`.
inline vf first_lanes(int count, vf a, vf b) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << count) - 1), b.v, a.v)};
}
inline float sum(vf a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(vf a) { return _mm512_reduce_max_ps(a.v); }
inline bool any_nan(vf a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }

inline vi izero() { return {_mm512_setzero_si512()}; }
inline vi iset1(int x) { return {_mm512_set1_epi32(x)}; }
inline vi operator+(vi a, vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline vf to_float(vi a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline vi round_to_int(vf a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest even
inline int sum(vi a) { return _mm512_reduce_add_epi32(a.v); }
// 2^n for integral n within the exponent's range.
inline vf exp2_int(vi n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
// Stores the 16 lanes, each within [-128, 127], as bytes.
inline void store_s8(int8_t* p, vi a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
inline vi load_s8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

inline vbytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline vbytes low_nibbles(vbytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(0x0f)); }
inline vbytes high_nibbles(vbytes a) {
  return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(0x0f));
}
// acc[i] += sum over j<4 of u[4i+j] * s[j], with u unsigned and s four signed bytes in an int.
inline vi dot4(vi acc, vbytes u, int s) {
  return {_mm512_dpbusd_epi32(acc.v, u, _mm512_set1_epi32(s))};
}

// bfloat16 is stored as its upper 16 bits.
inline vf load_bf16(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline void store_bf16(uint16_t* p, vf a) {  // to nearest even; NaN is not expected here
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
inline vf load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// acc[i] += a[2i]*b[0] + a[2i+1]*b[1] with a 32 bf16 and b two bf16 packed in an int.
inline vf dot2(vf acc, vbytes a, int b) {
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a, (__m512bh)_mm512_set1_epi32(b))};
#else
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(0xffff0000)));
  float b0, b1;
  const int lo = b << 16, hi = b & static_cast<int>(0xffff0000);
  __builtin_memcpy(&b0, &lo, 4);
  __builtin_memcpy(&b1, &hi, 4);
  return {_mm512_fmadd_ps(odd, _mm512_set1_ps(b1), _mm512_fmadd_ps(even, _mm512_set1_ps(b0), acc.v))};
#endif
}

#elif defined(__AVX2__)

constexpr int kLanes = 16;
struct vf { __m256 a, b; };
struct vi { __m256i a, b; };
struct vbytes { __m256i a, b; };

inline vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline vf operator+(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline vf operator-(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline vf operator*(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline vf operator/(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline vf fma(vf x, vf y, vf z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline vf max(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline vf min(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline vf abs(vf x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline vf floor(vf x) { return {_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)}; }
inline vf first_lanes(int count, vf x, vf y) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
  const __m256 hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lane));
  return {_mm256_blendv_ps(y.a, x.a, lo), _mm256_blendv_ps(y.b, x.b, hi)};
}
inline float sum(vf x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float largest(vf x) {
  const __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

inline bool any_nan(vf x) {
  return (_mm256_movemask_ps(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)) |
          _mm256_movemask_ps(_mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))) != 0;
}

inline vi izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline vi iset1(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline vi operator+(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline vi round_to_int(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline int sum(vi x) {
  const __m256i s = _mm256_add_epi32(x.a, x.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
inline vf exp2_int(vi n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}
inline void store_s8(int8_t* p, vi x) {
  alignas(32) int32_t lanes[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x.a);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8), x.b);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(lanes[i]);
}
inline vi load_s8(const int8_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(raw), _mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8))};
}

inline vbytes load_bytes(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline vbytes low_nibbles(vbytes x) {
  const __m256i mask = _mm256_set1_epi8(0x0f);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline vbytes high_nibbles(vbytes x) {
  const __m256i mask = _mm256_set1_epi8(0x0f);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(x.b, 4), mask)};
}
// maddubs would saturate at 16 bits, so the bytes are widened: even and odd ones apart.
inline __m256i dot4_half(__m256i acc, __m256i u, __m256i even_s, __m256i odd_s) {
  const __m256i even_u = _mm256_and_si256(u, _mm256_set1_epi16(0x00ff));
  const __m256i odd_u = _mm256_srli_epi16(u, 8);
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(even_u, even_s));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(odd_u, odd_s));
}
inline vi dot4(vi acc, vbytes u, int s) {
  const __m256i wide = _mm256_set1_epi32(s);
  const __m256i even_s = _mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 8);
  const __m256i odd_s = _mm256_srai_epi16(wide, 8);
  return {dot4_half(acc.a, u.a, even_s, odd_s), dot4_half(acc.b, u.b, even_s, odd_s)};
}

inline vf load_bf16(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(raw)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(raw, 1)), 16))};
}
inline __m128i to_bf16_half(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
inline void store_bf16(uint16_t* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16_half(x.a));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), to_bf16_half(x.b));
}
inline vf load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline __m256 dot2_half(__m256 acc, __m256i a, float b0, float b1) {
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
  const __m256 odd =
      _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  return _mm256_fmadd_ps(odd, _mm256_set1_ps(b1), _mm256_fmadd_ps(even, _mm256_set1_ps(b0), acc));
}
inline vf dot2(vf acc, vbytes a, int b) {
  float b0, b1;
  const int lo = b << 16, hi = b & static_cast<int>(0xffff0000);
  __builtin_memcpy(&b0, &lo, 4);
  __builtin_memcpy(&b1, &hi, 4);
  return {dot2_half(acc.a, a.a, b0, b1), dot2_half(acc.b, a.b, b0, b1)};
}

#else  // portable: plain loops over arrays, which compilers vectorise for what they target

constexpr int kLanes = 16;
struct vf { float v[16]; };
struct vi { int32_t v[16]; };
struct vbytes { uint8_t v[64]; };

#define HB_MAP(type, expression) \
  type out;                      \
  for (int i = 0; i < 16; ++i) out.v[i] = (expression); \
  return out

inline vf zero() { HB_MAP(vf, 0.0f); }
inline vf set1(float x) { HB_MAP(vf, x); }
inline vf load(const float* p) { HB_MAP(vf, p[i]); }
inline void store(float* p, vf x) { for (int i = 0; i < 16; ++i) p[i] = x.v[i]; }
inline vf operator+(vf x, vf y) { HB_MAP(vf, x.v[i] + y.v[i]); }
inline vf operator-(vf x, vf y) { HB_MAP(vf, x.v[i] - y.v[i]); }
inline vf operator*(vf x, vf y) { HB_MAP(vf, x.v[i] * y.v[i]); }
inline vf operator/(vf x, vf y) { HB_MAP(vf, x.v[i] / y.v[i]); }
inline vf fma(vf x, vf y, vf z) { HB_MAP(vf, x.v[i] * y.v[i] + z.v[i]); }
inline vf max(vf x, vf y) { HB_MAP(vf, x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
inline vf min(vf x, vf y) { HB_MAP(vf, x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
inline vf abs(vf x) { HB_MAP(vf, std::fabs(x.v[i])); }
inline vf floor(vf x) { HB_MAP(vf, std::floor(x.v[i])); }
inline vf first_lanes(int count, vf x, vf y) { HB_MAP(vf, i < count ? x.v[i] : y.v[i]); }
inline float sum(vf x) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
  return x.v[0];
}
inline float largest(vf x) {
  float best = x.v[0];
  for (int i = 1; i < 16; ++i) best = x.v[i] > best ? x.v[i] : best;
  return best;
}
inline bool any_nan(vf x) {
  bool found = false;
  for (int i = 0; i < 16; ++i) found |= x.v[i] != x.v[i];
  return found;
}
inline vi izero() { HB_MAP(vi, 0); }
inline vi iset1(int x) { HB_MAP(vi, x); }
inline vi operator+(vi x, vi y) { HB_MAP(vi, x.v[i] + y.v[i]); }
inline vf to_float(vi x) { HB_MAP(vf, static_cast<float>(x.v[i])); }
inline vi round_to_int(vf x) { HB_MAP(vi, static_cast<int32_t>(std::nearbyint(x.v[i]))); }
inline int sum(vi x) {
  int total = 0;
  for (int i = 0; i < 16; ++i) total += x.v[i];
  return total;
}
inline float float_from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline vf exp2_int(vi n) { HB_MAP(vf, float_from_bits(static_cast<uint32_t>(n.v[i] + 127) << 23)); }
inline void store_s8(int8_t* p, vi x) { for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(x.v[i]); }
inline vi load_s8(const int8_t* p) { HB_MAP(vi, p[i]); }
inline vbytes load_bytes(const void* p) {
  vbytes out;
  __builtin_memcpy(out.v, p, 64);
  return out;
}
inline vbytes low_nibbles(vbytes x) {
  for (auto& byte : x.v) byte &= 0x0f;
  return x;
}
inline vbytes high_nibbles(vbytes x) {
  for (auto& byte : x.v) byte = static_cast<uint8_t>(byte >> 4);
  return x;
}
inline vi dot4(vi acc, vbytes u, int s) {
  int8_t b[4];
  __builtin_memcpy(b, &s, 4);
  HB_MAP(vi, acc.v[i] + u.v[4 * i] * b[0] + u.v[4 * i + 1] * b[1] + u.v[4 * i + 2] * b[2] +
                 u.v[4 * i + 3] * b[3]);
}
inline vf load_bf16(const uint16_t* p) { HB_MAP(vf, float_from_bits(static_cast<uint32_t>(p[i]) << 16)); }
inline uint16_t bf16_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void store_bf16(uint16_t* p, vf x) { for (int i = 0; i < 16; ++i) p[i] = bf16_bits(x.v[i]); }
inline float f16_value(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 0x1f, mantissa = h & 0x3ff;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 0x1p-24f;
  if (exponent == 31) return float_from_bits(sign | 0x7f800000 | (mantissa << 13));
  return float_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}
inline vf load_f16(const uint16_t* p) { HB_MAP(vf, f16_value(p[i])); }
inline vf dot2(vf acc, vbytes a, int b) {
  uint16_t pairs[32];
  __builtin_memcpy(pairs, a.v, 64);
  const float b0 = float_from_bits(static_cast<uint32_t>(b) << 16);
  const float b1 = float_from_bits(static_cast<uint32_t>(b) & 0xffff0000u);
  HB_MAP(vf, float_from_bits(static_cast<uint32_t>(pairs[2 * i + 1]) << 16) * b1 +
                 (float_from_bits(static_cast<uint32_t>(pairs[2 * i]) << 16) * b0 + acc.v[i]));
}
#undef HB_MAP

#endif

// e^x to about 2 units in the last place, for x <= 88; below -87 the result is 0.
// Cody-Waite reduction and the degree-6 polynomial of Cephes' expf.
inline vf exp(vf x) {
  const vf low = set1(-87.3f);
  const vf clamped = max(min(x, set1(88.3f)), low);
  const vf n = floor(fma(clamped, set1(1.44269504088896341f), set1(0.5f)));
  vf r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  const vf y = p * exp2_int(round_to_int(n));
  // Underflow to exactly zero, so that a masked score of -infinity weighs nothing.
#if defined(__AVX512F__)
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, low.v, _CMP_GE_OQ), y.v)};
#elif defined(__AVX2__)
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, low.a, _CMP_GE_OQ), y.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, low.b, _CMP_GE_OQ), y.b)};
#else
  vf out;
  for (int i = 0; i < 16; ++i) out.v[i] = x.v[i] >= -87.3f ? y.v[i] : 0.0f;
  return out;
#endif
}

// The same function for one number, bit for bit what a lane would give.
inline float exp(float x) {
  alignas(64) float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// Further operations, for attention, rotary and sampling. A mask has bit i for lane i.
#if defined(__AVX512F__)

inline uint32_t mask_greater(vf a, vf b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline uint32_t mask_greater_equal(vf a, vf b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline uint32_t mask_equal(vf a, vf b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
// Lanes in which a or b is NaN.
inline uint32_t mask_unordered(vf a, vf b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q); }
// The first `count` lanes from memory, `fill` in the others; and the way back.
inline vf load_first(const float* p, int count, float fill) {
  return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), static_cast<__mmask16>((1u << count) - 1), p)};
}
inline void store_first(float* p, int count, vf a) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), a.v);
}
inline vi load_int(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_int(int32_t* p, vi a) { _mm512_storeu_si512(p, a.v); }
// Moves the lanes of `mask` together and stores them; up to 16 entries at p are overwritten.
// (Compressing straight to memory is microcoded on some CPUs.)
inline void store_packed(float* p, vf a, uint32_t mask) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), a.v));
}
// first, first + 1, ... in the same way.
inline void store_packed_indices(int32_t* p, int first, uint32_t mask) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(first), lane);
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), index));
}
// A sum of many floats in float64, sixteen lanes wide.
struct WideSum { __m512d low, high; };
inline WideSum wide_zero() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline void accumulate(WideSum& sum, vf a) {
  sum.low = _mm512_add_pd(sum.low, _mm512_cvtps_pd(_mm512_castps512_ps256(a.v)));
  sum.high = _mm512_add_pd(sum.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1)));
}
inline double total(const WideSum& sum) {
  return _mm512_reduce_add_pd(_mm512_add_pd(sum.low, sum.high));
}
// The same as store_bf16 but for denormals, which may become 0.
inline void store_bf16_fast(uint16_t* p, vf a) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
#else
  store_bf16(p, a);
#endif
}
// Stores four vectors as store_s8 does, one behind the other. Returns sums of four of their numbers
// a lane, in any order.
inline vi store_s8(int8_t* p, vi a, vi b, vi c, vi d) {
  const __m512i words = _mm512_packs_epi32(a.v, b.v), more = _mm512_packs_epi32(c.v, d.v);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words, more));
  _mm512_storeu_si512(p, bytes);
  return {_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes)};
}
// Lane i of the result is all lanes of rows[i] combined, in the same order for each: less than half
// the work of one row at a time.
template <class Combine>
inline __m512 reduce_rows(const __m512 (&rows)[16], Combine combine) {
  __m512 fours[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 *r = rows + 4 * i;
    const __m512d one = _mm512_castps_pd(
        combine(_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1])));
    const __m512d two = _mm512_castps_pd(
        combine(_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3])));
    fours[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(one, two)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(one, two)));
  }
  __m512 eights[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 x = fours[2 * i], y = fours[2 * i + 1];
    eights[i] = combine(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  }
  return combine(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                 _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

// Every 32-bit word of `a` and `keep`.
inline vbytes and_words(vbytes a, uint32_t keep) {
  return _mm512_and_si512(a, _mm512_set1_epi32(static_cast<int>(keep)));
}

#elif defined(__AVX2__)

inline uint32_t movemask(__m256 a, __m256 b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(a)) |
         static_cast<uint32_t>(_mm256_movemask_ps(b)) << 8;
}
inline uint32_t mask_greater(vf x, vf y) {
  return movemask(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ));
}
inline uint32_t mask_greater_equal(vf x, vf y) {
  return movemask(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
}
inline uint32_t mask_equal(vf x, vf y) {
  return movemask(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ));
}
inline uint32_t mask_unordered(vf x, vf y) {
  return movemask(_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q));
}
inline vi load_int(const int32_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store_int(int32_t* p, vi x) {
  auto* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
struct WideSum { __m256d part[4]; };
inline WideSum wide_zero() {
  const __m256d nothing = _mm256_setzero_pd();
  return {{nothing, nothing, nothing, nothing}};
}
inline void accumulate(WideSum& sum, vf x) {
  sum.part[0] = _mm256_add_pd(sum.part[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.a)));
  sum.part[1] = _mm256_add_pd(sum.part[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)));
  sum.part[2] = _mm256_add_pd(sum.part[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)));
  sum.part[3] = _mm256_add_pd(sum.part[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1)));
}
inline double total(const WideSum& sum) {
  alignas(32) double lanes[4];
  _mm256_store_pd(lanes, _mm256_add_pd(_mm256_add_pd(sum.part[0], sum.part[1]),
                                       _mm256_add_pd(sum.part[2], sum.part[3])));
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}
inline void store_bf16_fast(uint16_t* p, vf x) { store_bf16(p, x); }
inline vbytes and_words(vbytes x, uint32_t keep) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(keep));
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}

#else

#define HB_MASK(condition)                                              \
  uint32_t mask = 0;                                                    \
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(condition) << i; \
  return mask
inline uint32_t mask_greater(vf x, vf y) { HB_MASK(x.v[i] > y.v[i]); }
inline uint32_t mask_greater_equal(vf x, vf y) { HB_MASK(x.v[i] >= y.v[i]); }
inline uint32_t mask_equal(vf x, vf y) { HB_MASK(x.v[i] == y.v[i]); }
inline uint32_t mask_unordered(vf x, vf y) { HB_MASK(x.v[i] != x.v[i] || y.v[i] != y.v[i]); }
#undef HB_MASK
inline vi load_int(const int32_t* p) {
  vi out;
  __builtin_memcpy(out.v, p, sizeof out.v);
  return out;
}
inline void store_int(int32_t* p, vi x) { __builtin_memcpy(p, x.v, sizeof x.v); }
struct WideSum { double v[16]; };
inline WideSum wide_zero() { return {}; }
inline void accumulate(WideSum& sum, vf x) {
  for (int i = 0; i < 16; ++i) sum.v[i] += static_cast<double>(x.v[i]);
}
inline double total(WideSum sum) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sum.v[i] += sum.v[i + width];
  return sum.v[0];
}
inline void store_bf16_fast(uint16_t* p, vf x) { store_bf16(p, x); }
inline vbytes and_words(vbytes x, uint32_t keep) {
  for (int i = 0; i < 16; ++i) {
    uint32_t word;
    __builtin_memcpy(&word, x.v + 4 * i, 4);
    word &= keep;
    __builtin_memcpy(x.v + 4 * i, &word, 4);
  }
  return x;
}

#endif

#if !defined(__AVX512F__)
inline vf load_first(const float* p, int count, float fill) {
  alignas(64) float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = i < count ? p[i] : fill;
  return load(lanes);
}
inline void store_first(float* p, int count, vf x) {
  alignas(64) float lanes[16];
  store(lanes, x);
  for (int i = 0; i < count; ++i) p[i] = lanes[i];
}
inline void store_packed(float* p, vf x, uint32_t mask) {
  alignas(64) float lanes[16];
  store(lanes, x);
  for (; mask; mask &= mask - 1) *p++ = lanes[__builtin_ctz(mask)];
}
inline void store_packed_indices(int32_t* p, int first, uint32_t mask) {
  for (; mask; mask &= mask - 1) *p++ = first + __builtin_ctz(mask);
}
#endif

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

inline float first_lane(vf x) {
#if defined(__AVX512F__)
  return _mm512_cvtss_f32(x.v);
#elif defined(__AVX2__)
  return _mm256_cvtss_f32(x.a);
#else
  return x.v[0];
#endif
}

// 2^x to about 2 units in the last place, for x <= 126; far below -126 the result is next to
// nothing. NaN stays NaN. Polynomial of Cephes' exp2f.
inline vf exp2_near(vf x) {
#if defined(__AVX512F__)
  const vf n = {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  const vf r = x - n;
#else
  x = max(set1(-127.0f), x);
  const vi n = round_to_int(x);
  const vf r = x - to_float(n);
#endif
  vf p = set1(1.535336188319500e-4f);
  p = fma(p, r, set1(1.339887440266574e-3f));
  p = fma(p, r, set1(9.618437357674640e-3f));
  p = fma(p, r, set1(5.550332471162809e-2f));
  p = fma(p, r, set1(2.402264791363012e-1f));
  p = fma(p, r, set1(6.931472028550421e-1f));
  p = fma(p, r, set1(1.0f));
#if defined(__AVX512F__)
  return {_mm512_scalef_ps(p.v, n.v)};
#else
  return p * exp2_int(n);
#endif
}

// The same, but that below -126.5 the result is exactly 0.
inline vf exp2(vf x) {
#if defined(__AVX512F__)
  // Scaling reaches down to denormals; cut where the other paths do.
  const __mmask16 enough = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.5f), _CMP_NLT_UQ);
  return {_mm512_maskz_mov_ps(enough, exp2_near(x).v)};
#else
  return exp2_near(x);
#endif
}

// Makes the compiler keep a loaded vector in a register: GCC would rather load it again for
// every use, and then loads, not products, are what a loop waits for.
#if defined(__AVX512F__)
inline vbytes held(vbytes x) {
  asm("" : "+v"(x));
  return x;
}
inline vf held(vf x) {
  asm("" : "+v"(x.v));
  return x;
}
inline vi held(vi x) {
  asm("" : "+v"(x.v));
  return x;
}
inline const int8_t* held(const int8_t* p) {
  asm("" : "+r"(p));
  return p;
}
#else
inline vbytes held(vbytes x) { return x; }
inline vf held(vf x) { return x; }
inline vi held(vi x) { return x; }
inline const int8_t* held(const int8_t* p) { return p; }
#endif

// Bits of each lane, the lanes not being negative.
#if defined(__AVX512F__)
inline vi shift_right(vi a, int bits) { return {_mm512_srli_epi32(a.v, static_cast<unsigned>(bits))}; }
inline vi and_int(vi a, int bits) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(bits))}; }
#elif defined(__AVX2__)
inline vi shift_right(vi x, int bits) {
  return {_mm256_srli_epi32(x.a, bits), _mm256_srli_epi32(x.b, bits)};
}
inline vi and_int(vi x, int bits) {
  const __m256i mask = _mm256_set1_epi32(bits);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
#else
inline vi shift_right(vi x, int bits) {
  for (auto& lane : x.v) lane >>= bits;
  return x;
}
inline vi and_int(vi x, int bits) {
  for (auto& lane : x.v) lane &= bits;
  return x;
}
#endif

// `value` where `condition` is not 0 (NaN included), else 0.
inline vf where_nonzero(vf condition, vf value) {
#if defined(__AVX512F__)
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(condition.v, _mm512_setzero_ps(), _CMP_NEQ_UQ), value.v)};
#elif defined(__AVX2__)
  const __m256 nothing = _mm256_setzero_ps();
  return {_mm256_and_ps(_mm256_cmp_ps(condition.a, nothing, _CMP_NEQ_UQ), value.a),
          _mm256_and_ps(_mm256_cmp_ps(condition.b, nothing, _CMP_NEQ_UQ), value.b)};
#else
  for (int i = 0; i < 16; ++i) value.v[i] = condition.v[i] != 0.0f ? value.v[i] : 0.0f;
  return value;
#endif
}

// `value` where a >= b, else 0.
inline vf where_greater_equal(vf a, vf b, vf value) {
#if defined(__AVX512F__)
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), value.v)};
#elif defined(__AVX2__)
  return {_mm256_and_ps(_mm256_cmp_ps(a.a, b.a, _CMP_GE_OQ), value.a),
          _mm256_and_ps(_mm256_cmp_ps(a.b, b.b, _CMP_GE_OQ), value.b)};
#else
  for (int i = 0; i < 16; ++i) value.v[i] = a.v[i] >= b.v[i] ? value.v[i] : 0.0f;
  return value;
#endif
}

// Where a >= b, adds `value` to `sum` and 1 to `count`.
inline void add_where_greater_equal(vf& sum, vi& count, vf a, vf b, vf value) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
  sum.v = _mm512_mask_add_ps(sum.v, mask, sum.v, value.v);
  count.v = _mm512_mask_add_epi32(count.v, mask, count.v, _mm512_set1_epi32(1));
#elif defined(__AVX2__)
  const __m256 low = _mm256_cmp_ps(a.a, b.a, _CMP_GE_OQ), high = _mm256_cmp_ps(a.b, b.b, _CMP_GE_OQ);
  sum = sum + vf{_mm256_and_ps(low, value.a), _mm256_and_ps(high, value.b)};
  count = {_mm256_sub_epi32(count.a, _mm256_castps_si256(low)),  // a set mask is -1
           _mm256_sub_epi32(count.b, _mm256_castps_si256(high))};
#else
  for (int i = 0; i < 16; ++i) {
    const bool take = a.v[i] >= b.v[i];
    sum.v[i] += take ? value.v[i] : 0.0f;
    count.v[i] += take;
  }
#endif
}
