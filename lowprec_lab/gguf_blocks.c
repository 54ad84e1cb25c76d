/* The given part of an answer in C (chapter 12): what stands around your function.

   A quantizer takes `blocks` blocks of 32 floats, one after the other, and writes as many blocks of bytes. It returns
   nothing, keeps nothing, and never reads or writes beyond its two arrays. */

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 32 /* floats in a block */

#if defined(__GNUC__)
#define GIVEN static __attribute__((unused))
#else
#define GIVEN static
#endif

/* The float16 nearest to x, ties to even, as its 16 bits: what a block's scale is stored as. */
GIVEN uint16_t half_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) /* NaN */
        return (uint16_t)(sign | 0x7E00);
    if (magnitude >= 0x477FF000) /* 65520, half-way to what would be the next value, and all above */
        return (uint16_t)(sign | 0x7C00);
    int exponent = (int)(magnitude >> 23);
    uint32_t mantissa = (magnitude & 0x7FFFFF) | 0x800000;
    int shift = exponent < 113 ? 126 - exponent : 13; /* bits that are cut off; more below 2^-14, float16's last normal */
    if (shift > 24) /* below half of 2^-24, the smallest float16 */
        return (uint16_t)sign;
    uint32_t last = mantissa >> shift & 1, half = 1u << (shift - 1);
    uint32_t kept = (mantissa + half - 1 + last) >> shift; /* no branch on what is cut off: nobody could predict it */
    if (shift == 13) /* the leading one goes: the exponent says it, and a carry is right there */
        kept += ((uint32_t)(exponent - 112) << 10) - 0x400;
    return (uint16_t)(sign | kept);
}

/*** YOUR FUNCTION ***/
