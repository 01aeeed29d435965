package pairing

// weightSeed keeps draws about weights apart from those of tie-breakers.
const weightSeed = 0x77656967 // "weig"

// draw is a number in [0, 1) that is evenly spread over different words and always the same for the same ones.
func draw(seed uint64, words ...string) float64 {
	return float64(mix(seed, words...)>>11) / (1 << 53)
}

// mix hashes words: FNV-1a, finished as splitmix64 does, since FNV alone leaves the upper bits of short words alike.
func mix(seed uint64, words ...string) uint64 {
	const prime = 0x100000001b3
	h := seed ^ 0xcbf29ce484222325
	for _, w := range words {
		for i := range len(w) {
			h = (h ^ uint64(w[i])) * prime
		}
		h = (h ^ 0xff) * prime // ends a word: "ab", "c" is not "a", "bc"
	}
	h ^= h >> 30
	h *= 0xbf58476d1ce4e5b9
	h ^= h >> 27
	h *= 0x94d049bb133111eb
	return h ^ h>>31
}
