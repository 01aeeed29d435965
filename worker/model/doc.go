// Package model runs the forward pass of Llama-family GGUF models over a paged KV cache. It must not know about
// requests, tokenizers or where a cache's memory comes from.
//
// What a token's keys, values and logits are depends on the model file and the tokens before it only, bit for bit:
// not on how a prompt was cut into chunks, what else was in the batch, which blocks hold the cache, how many threads
// ran or which instruction set they used (package kernel says how).
package model
