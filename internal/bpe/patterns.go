package bpe

import "strings"

// The ends that expressions share.
const (
	anyContraction = `(?i:'s|'t|'re|'ve|'m|'ll|'d)`
	tail           = `|\s*[\r\n]+|\s+(?!\S)|\s+`
	symbols        = `| ?[^\s\p{L}\p{N}]+[\r\n]*`
	symbolsSlash   = `| ?[^\s\p{L}\p{N}]+[\r\n/]*`
	begin          = `[^\r\n\p{L}\p{N}]?`
	uppers         = `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
	lowers         = `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
)

// patterns are the split expressions that there is a scanner for, with line ends written as escapes.
var patterns = map[string]scanner{
	`'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`: scanGPT2,
	`'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`:    scanGPT2,
	// Llama 3, GPT-4 (as exported), Qwen 2 and 3
	anyContraction + `|` + begin + `\p{L}+|\p{N}{1,3}` + symbols + tail: scanLlama(3, letter),
	anyContraction + `|` + begin + `\p{L}+|\p{N}` + symbols + tail:      scanLlama(1, letter),
	// Qwen 3.5
	anyContraction + `|` + begin + `[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*` + tail: scanLlama(1, letter|mark),
	// GPT-4o, gpt-oss, Llama 4
	begin + uppers + `*` + lowers + `+` + anyContraction + `?|` + begin + uppers + `+` + lowers + `*` + anyContraction + `?|\p{N}{1,3}` + symbolsSlash + tail: scanO200k(3, true),
	// Mistral's Tekken
	begin + uppers + `*` + lowers + `+|` + begin + uppers + `+` + lowers + `*|\p{N}` + symbolsSlash + tail: scanO200k(1, false),
	// DeepSeek V3: three splits, one behind the other
	`\p{N}{1,3}`:   scanDigits3,
	`[一-龥぀-ゟ゠-ヿ]+`: scanCJK,
	"[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*" + tail: scanDeepSeek,
	`\p{N}`:  scanDigit,
	`\p{N}+`: scanNumber,
}

// scannerOf returns the scanner of an expression.
func scannerOf(expression string) (scanner, error) {
	s := patterns[strings.NewReplacer("\r", `\r`, "\n", `\n`).Replace(expression)]
	if s == nil {
		return nil, unsupported("split expression %.200q has no scanner", expression)
	}
	return s, nil
}
