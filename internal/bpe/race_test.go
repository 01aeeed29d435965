//go:build race

package bpe

// raceEnabled says that pools drop what they hold at random.
const raceEnabled = true
