# %% [markdown]
# # Glossary
#
# Every term of the course in a sentence, and where it is taught. Terms are added as chapters are.
#
# | term | meaning | taught in |
# |---|---|---|
# | **accumulator** | the number that a sum is collected in; its format decides how much of the sum survives | [03](03_accumulation.ipynb) |
# | **activation** | what comes out of a layer on the way forward | [05](05_instruments.ipynb) |
# | **AdamW** | the optimizer that divides a running mean of gradients by the root of a running mean of their squares; weight decay is added to the update | [6.6](06_loss_scaling.ipynb) |
# | **agreement** | the share of tokens for which two models think the same next token likeliest | [11.6](11_fp8_inference.ipynb) |
# | **alignment** | what the place of a tensor in a file is a multiple of: 32 bytes in GGUF, where nothing else is said | [12.11](12_gguf.ipynb) |
# | **all-gather** | a collective after which every rank has what all of them had | [14.7](14_distributed.ipynb) |
# | **all-reduce** | a collective after which every rank has the sum (or the largest) of what all had | [14.1](14_distributed.ipynb) |
# | **amax** | the largest magnitude of a group of numbers: what a scale is made of | [7.1](07_quantizer.ipynb) |
# | **autocast** | a block of code in which torch casts the arguments of ops, each by its policy | [04](04_autocast.ipynb) |
# | **backend** | who carries the bytes between ranks: NCCL between GPUs, gloo between CPUs | [14](14_distributed.ipynb) |
# | **BF16** (bfloat16) | 1 sign, 8 exponent and 7 mantissa bits: the upper half of a float32 | [1.3](01_bit_layouts.ipynb) |
# | **bias** | the number that is subtracted from the stored exponent field to get the exponent; `fmt.bias` | [1.5](01_bit_layouts.ipynb) |
# | **binade** | the numbers from one power of two up to the next; within one all values of a format are evenly spaced | [1.10](01_bit_layouts.ipynb) |
# | **bit-exact** | equal in every bit; NaNs count as equal whatever their sign and payload | [00](00_start.ipynb) |
# | **block** | r rows and c columns of a tensor that share a scale; in a GGUF file, 32 or 256 numbers of a row and their bytes | [7.1](07_quantizer.ipynb) |
# | **calibrate** | work out static scales from samples of real text | [11.4](11_fp8_inference.ipynb) |
# | **cast cache** | the BF16 copies of weights that autocast keeps until its block ends | [4.5](04_autocast.ipynb) |
# | **cast** (of an operand) | quantizing one operand of one product: format, granularity, and whether scales are powers of two | [8.1](08_float8_linear.ipynb) |
# | **checkpoint** (in 8 bits) | a file of codes and scales, and one that says what they are | [11](11_fp8_inference.ipynb) |
# | **clip** | make numbers beyond a limit equal to it, so that the others get finer steps; also the limit | [7.8](07_quantizer.ipynb) |
# | **code** | the bit pattern of a number, read as a whole number | [1.1](01_bit_layouts.ipynb) |
# | **codebook** | a list of numbers that codes stand for, in place of a format | [15.5](15_capstone.ipynb) |
# | **collective** | a function that all ranks of a group call, and that ends when all have | [14](14_distributed.ipynb) |
# | **column-parallel** | a linear layer whose outputs are divided among ranks; **row-parallel**: whose inputs are | [14.8](14_distributed.ipynb) |
# | **compensate** | round a weight column by column, and let later columns make up for the error, as GPTQ does | [11.9](11_fp8_inference.ipynb) |
# | **compute capability** | the number of a GPU's architecture: 8.6 is an RTX 3090, 8.9 an RTX 4070, 9.0 an H100, 10.0 a B200; float8 begins with 8.9 | [09](09_scaled_mm.ipynb) |
# | **cuBLAS**, **CUTLASS** | NVIDIA's library of matrix products, and its collection of parts to build them from | [9.5](09_scaled_mm.ipynb) |
# | **current scaling** | a scale from the tensor that is cast, which has to be read twice for it; also called dynamic | [10](10_fp8_nanogpt.ipynb) |
# | **data parallel** | ranks with the same weights, and other batches | [14](14_distributed.ipynb) |
# | **decibel** | ten times the decimal logarithm of a ratio of energies: 10 dB more is ten times as much, 6 dB are one bit | [7.5](07_quantizer.ipynb) |
# | **delayed scaling** | a scale from the largest magnitudes of earlier steps, known before the tensor is there | [10.2](10_fp8_nanogpt.ipynb) |
# | **dequantize** | decode, and take the scale out again | [7.4](07_quantizer.ipynb) |
# | **double rounding** | rounding first to one format and then to another: now and then another value than rounding once | [2.6](02_rounding.ipynb) |
# | **dtype** | torch's name for the type of a tensor's elements, such as `torch.float8_e4m3fn` | [1.5](01_bit_layouts.ipynb) |
# | **dynamic**, **static** (scale) | worked out from each tensor as it comes, or beforehand from samples | [11.3](11_fp8_inference.ipynb) |
# | **E4M3, E5M2** | the two 8-bit formats of FP8: 4 exponent and 3 mantissa bits, or 5 and 2. E4M3 without suffix means E4M3FN | [01](01_bit_layouts.ipynb) |
# | **E8M0** | eight exponent bits and nothing else: a power of two; the scale of block formats | [1.2](01_bit_layouts.ipynb) |
# | **emulated** | computed in float32 with the codes and scales of 8 bits, where hardware cannot multiply them | [8.3](08_float8_linear.ipynb) |
# | **epilogue** | what a kernel does with a finished sum: multiply by both scales, add the bias | [11.5](11_fp8_inference.ipynb) |
# | **exponent** | the field that says which power of two a number is multiplied by | [1.2](01_bit_layouts.ipynb) |
# | **exponent histogram** | how many numbers of a tensor lie in each binade | [5.1](05_instruments.ipynb) |
# | **fall back** | take another type for a tensor whose rows the blocks of the wanted one do not divide | [12.11](12_gguf.ipynb) |
# | **field** | a run of bits of a code with one meaning: sign, exponent or mantissa | [1.2](01_bit_layouts.ipynb) |
# | **fifth bits** | the highest bits of Q5_0's codes, 32 of them in four bytes of their own | [12.5](12_gguf.ipynb) |
# | **finite** | neither infinity nor NaN; also the name of the rule that makes every code of a format a number | [1.4](01_bit_layouts.ipynb) |
# | **fn** | the rule of E4M3: no infinity; NaN is the code whose exponent and mantissa bits are all set | [1.4](01_bit_layouts.ipynb) |
# | **fnuz** | finite, NaN, unsigned zero: no infinity and no -0; the code of -0 is the only NaN | [1.4](01_bit_layouts.ipynb) |
# | **format** | a rule for reading bits as a number; here an object of the class `Format` | [01](01_bit_layouts.ipynb) |
# | **FP16** (float16, half) | 1 sign, 5 exponent and 10 mantissa bits | [1.3](01_bit_layouts.ipynb) |
# | **FP8** | any 8-bit floating-point format, usually E4M3 or E5M2 | [01](01_bit_layouts.ipynb) |
# | **fused multiply-add** (FMA) | x · y + z with one rounding at the end instead of two; it changes bytes of Q4_0 | [12.3](12_gguf.ipynb) |
# | **GGUF** | llama.cpp's file: metadata, then the bytes of each tensor, ready to be computed with | [12.11](12_gguf.ipynb) |
# | **gradient norm** | the length of all gradients together: the root of the sum of their squares | [5.5](05_instruments.ipynb) |
# | **granularity** | which numbers share a scale: a tensor, a row, a column, a block | [07](07_quantizer.ipynb) |
# | **group** | the numbers that share a scale | [07](07_quantizer.ipynb) |
# | **group** (of ranks) | some of the ranks, which have collectives of their own | [14.4](14_distributed.ipynb) |
# | **Hadamard rotation** | a product with an orthogonal matrix of equal magnitudes, which spreads outliers | [13.8](13_block_formats.ipynb) |
# | **hidden one** | the 1 in front of the point of a normal number's mantissa, which is not stored | [1.5](01_bit_layouts.ipynb) |
# | **history** | the largest magnitudes of the last steps, from which a delayed scale comes | [10.1](10_fp8_nanogpt.ipynb) |
# | **hook** | a function that torch calls when a module has computed its output, or when a gradient arrives | [5.7](05_instruments.ipynb) |
# | **hysteresis** | how many overflows a loss scaler waits for before it lowers the scale | [6.5](06_loss_scaling.ipynb) |
# | **ieee** | the rule of IEEE 754: an exponent of all ones is infinity or NaN | [1.4](01_bit_layouts.ipynb) |
# | **infinity** | the special value above all numbers; overflow may produce it | [1.4](01_bit_layouts.ipynb) |
# | **inverse scale** | what a code is multiplied with to get its value; `_scaled_mm` takes these | [9.1](09_scaled_mm.ipynb) |
# | **Kahan's sum** | a sum that carries along what each addition lost, and adds it to the next element | [3.3](03_accumulation.ipynb) |
# | **K-quants** (Q4_K, Q6_K, ...) | llama.cpp's blocks of 256 numbers, in which the scales of groups are quantized as well | [12.8](12_gguf.ipynb) |
# | **KL divergence** | how much worse one distribution predicts what another says, in nats per token | [11.6](11_fp8_inference.ipynb) |
# | **KV cache** | the keys and values of all tokens so far, so that they are not computed again | [11.7](11_fp8_inference.ipynb) |
# | **layout** | which bytes of a block hold its scale, and which its codes | [12.2](12_gguf.ipynb) |
# | **logits** | what the last layer says of each token of the vocabulary, before softmax | [04](04_autocast.ipynb) |
# | **loss scale** | the number that the loss is multiplied by before backward, and the gradients are divided by after it, so that they fit into FP16 | [06](06_loss_scaling.ipynb) |
# | **machine epsilon** | the distance from 1.0 to the next larger value: 2^-m with m mantissa bits | [1.8](01_bit_layouts.ipynb) |
# | **main gradient** | the float32 sum of a parameter's gradients over micro-batches | [14.1](14_distributed.ipynb) |
# | **mantissa** | the field behind the point; also called significand or fraction elsewhere | [1.2](01_bit_layouts.ipynb) |
# | **margin** | by how many powers of two a scale is smaller than it could be, as room for larger numbers | [10.1](10_fp8_nanogpt.ipynb) |
# | **mask** | a number whose set bits say which bits to keep: `codes & mask` | [1.2](01_bit_layouts.ipynb) |
# | **master weights** | float32 weights that updates are added to, while layers compute with a short copy | [3.7](03_accumulation.ipynb) |
# | **metadata** | what a file says of a model beside its tensors: sizes, names, the vocabulary | [12.11](12_gguf.ipynb) |
# | **micro-batch** | as much as one forward and backward takes; several make a step | [14](14_distributed.ipynb) |
# | **min** (of a group) | its smallest number with the sign turned, as Q4_K stores it: a multiple of dmin | [12.8](12_gguf.ipynb) |
# | **misconception** | a wrong answer that many people write; a verdict names it when yours behaves exactly like it | [00](00_start.ipynb) |
# | **mode** | which of the two neighbours rounding chooses: `nearest_even`, `nearest_away`, `toward_zero`, `up` or `down` | [02](02_rounding.ipynb) |
# | **moment** (of Adam) | a running mean of gradients, or of their squares | [13.9](13_block_formats.ipynb) |
# | **MX**, **MXFP8**, **MXFP6**, **MXFP4** | blocks of 32 codes of 8, 6 or 4 bits with a scale in E8M0 | [13.2](13_block_formats.ipynb) |
# | **NaN** | not a number: the result of 0/0 and the like | [1.4](01_bit_layouts.ipynb) |
# | **nearest_even**, **nearest_away** | the nearer neighbour; a tie goes to the value whose last bit is 0, or away from zero | [02](02_rounding.ipynb) |
# | **nibble** | half a byte: one of two 4-bit codes in it | [12.2](12_gguf.ipynb) |
# | **noise** | the random number in [0, 1) that decides a stochastic rounding | [2.5](02_rounding.ipynb) |
# | **normal** | a number with a hidden one | [1.4](01_bit_layouts.ipynb) |
# | **NVFP4** | blocks of 16 E2M1 codes with a scale in E4M3, and one in float32 for the tensor | [13.6](13_block_formats.ipynb) |
# | **op** | one operation of torch's library, ATen, such as `linear` or `_to_copy`; the recorder sees the ones for which a kernel is chosen | [4.2](04_autocast.ipynb) |
# | **operand** | one of the two matrices of a product | [08](08_float8_linear.ipynb) |
# | **oracle** | the exact calculation that your results are compared with; it shares no code with your answer or the reference | [00](00_start.ipynb) |
# | **outlier** | a number far larger than the rest of its tensor; one is enough to decide a scale | [05](05_instruments.ipynb) |
# | **output channel** | a row of a linear layer's weight | [11.1](11_fp8_inference.ipynb) |
# | **overflow** | a rounded value above the largest finite one; the policy (`saturate` or `to_special`) says what becomes of it | [2.3](02_rounding.ipynb) |
# | **padding** | zeros that bring a size to a multiple that hardware wants | [10.4](10_fp8_nanogpt.ipynb) |
# | **pairwise sum** | a sum in a tree: neighbours first, then the sums of neighbours | [3.2](03_accumulation.ipynb) |
# | **Pareto front** | the points that no other one beats in everything | [15.4](15_capstone.ipynb) |
# | **payload** | the mantissa bits of a NaN that nobody interprets | [1.1](01_bit_layouts.ipynb) |
# | **perplexity** | exp of the mean loss: among how many equally likely tokens a model might as well guess | [11.6](11_fp8_inference.ipynb) |
# | **pipeline** | ranks that have other layers each | [14](14_distributed.ipynb) |
# | **policy** | what autocast does with the arguments of an op: lower precision, fp32, promote, or as is | [4.3](04_autocast.ipynb) |
# | **promotion** | adding a short accumulator to a float32 one after every few products, and starting it again at zero | [3.5](03_accumulation.ipynb) |
# | **Q8_0**, **Q4_0**, **Q4_1**, **Q5_0** | llama.cpp's blocks of 32 numbers: a float16 scale (and a smallest number, in *_1*), and codes of so many bits | [12](12_gguf.ipynb) |
# | **quantize** | multiply by a scale and round to codes | [7.3](07_quantizer.ipynb) |
# | **rank** | one process of a run, and its number; all of them are the **world** | [14](14_distributed.ipynb) |
# | **recipe** | how each of the six operands of a linear layer is cast | [8.2](08_float8_linear.ipynb) |
# | **reference** | the course's own answer to an exercise | [00](00_start.ipynb) |
# | **residual stream** | the tensor that flows past the blocks of a GPT, and to which each adds its part | [04](04_autocast.ipynb) |
# | **round** | choose a value of a format for a number that need not be one | [02](02_rounding.ipynb) |
# | **row-major**, **column-major** | the elements of a row, or of a column, are neighbours in memory: strides (columns, 1) or (1, rows) | [9.2](09_scaled_mm.ipynb) |
# | **saturate** | become the largest finite value instead of infinity or NaN | [2.3](02_rounding.ipynb) |
# | **scale** | the number that a group is multiplied by before it is rounded, and divided by afterwards; for int8, in hardware and in chapter 11, its inverse | [7.2](07_quantizer.ipynb) |
# | **shard** | the part of a tensor that one rank keeps | [14.7](14_distributed.ipynb) |
# | **sign bit** | the topmost bit: set for negative numbers, for -0.0, and for some NaNs | [0.1](00_start.ipynb) |
# | **skipped step** | a training step that is not taken, since a gradient is infinite or NaN | [6.7](06_loss_scaling.ipynb) |
# | **smooth** | divide an activation's channels by factors, and multiply the weights behind them | [11.8](11_fp8_inference.ipynb) |
# | **split-K** | cutting a matrix product along K into several, whose results are added up at the end | [3.B](03_accumulation.ipynb) |
# | **SQNR** | signal-to-quantization-noise ratio: the energy of a tensor over that of its error, in decibel | [7.5](07_quantizer.ipynb) |
# | **stagnation** | a sum or a weight that stands still because everything added to it is less than half a step | [03](03_accumulation.ipynb) |
# | **standard error** | how far a mean of several runs may be off: their standard deviation over the root of their number | [10.7](10_fp8_nanogpt.ipynb) |
# | **stochastic rounding** | rounding up or down at random, so that the mean of many roundings is the number itself | [2.5](02_rounding.ipynb) |
# | **straight-through estimator** | rounding forward, and backward as if it were not there | [7.7](07_quantizer.ipynb) |
# | **strides** | how far one goes in memory to the next element of each dimension | [9.2](09_scaled_mm.ipynb) |
# | **subnormal** | a number near zero without a hidden one, with the exponent of the smallest normal number | [1.5](01_bit_layouts.ipynb) |
# | **tensor parallel** | ranks that have parts of the same layers | [14](14_distributed.ipynb) |
# | **tensorwise**, **rowwise**, **blockwise** | one scale for a whole matrix, one for each row of a and column of b, one for each block | [9.4](09_scaled_mm.ipynb) |
# | **TF32** | float32 with 10 mantissa bits: what a tensor core reads of a float32 tensor if it is allowed to | [04](04_autocast.ipynb) |
# | **tie** | a number exactly half-way between two neighbouring values of a format | [02](02_rounding.ipynb) |
# | **tied weights** | one parameter that two layers use, such as a GPT's embedding and head | [10.5](10_fp8_nanogpt.ipynb) |
# | **toward_zero**, **up**, **down** | the neighbour nearer to zero, above, or below | [02](02_rounding.ipynb) |
# | **two's complement** | how an int32 stores negative numbers: the topmost bit counts as -2^31 | [1.1](01_bit_layouts.ipynb) |
# | **type promotion** | torch's rule for ops on tensors of two dtypes: float32 and BF16 give float32 | [04](04_autocast.ipynb) |
# | **ulp** | unit in the last place: the distance between neighbouring values of a format around a number | [1.10](01_bit_layouts.ipynb) |
# | **underflow** | a number that is not zero is rounded to zero | [5.2](05_instruments.ipynb) |
# | **unscale** | divide the gradients by the loss scale, in float32, before anything looks at them | [6.1](06_loss_scaling.ipynb) |
# | **update ratio** | the norm of a step over the norm of the weight that it moves | [5.6](05_instruments.ipynb) |
# | **verdict** | what `check` says about an answer: bit-exact, close, or wrong | [00](00_start.ipynb) |
# | **W8A8**, **W8A16** | weights and activations in 8 bits, or weights alone (weight-only) | [11](11_fp8_inference.ipynb) |
# | **zero point** | the code of 0 where codes are whole numbers | [7.6](07_quantizer.ipynb) |
