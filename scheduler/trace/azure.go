package trace

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// azure reads comma-separated values with the columns TIMESTAMP, ContextTokens and GeneratedTokens, in any order and with others
// between them (Azure/AzurePublicDataset, AzureLLMInferenceTrace).
type azure struct {
	rows  *csv.Reader
	at    int // columns
	in    int
	out   int
	line  int
	first time.Time
	last  time.Duration
}

// azureTime is how the published traces write times; fractions of any length, and none, are read too.
const azureTime = "2006-01-02 15:04:05"

func newAzure(r *bufio.Reader) (Reader, error) {
	a := &azure{rows: csv.NewReader(r), at: -1, in: -1, out: -1}
	a.rows.ReuseRecord = true
	head, err := a.rows.Read()
	if err != nil {
		return nil, fmt.Errorf("read trace, header: %w", err)
	}
	for i, name := range head {
		switch strings.ToLower(strings.TrimSpace(strings.TrimPrefix(name, "\ufeff"))) {
		case "timestamp":
			a.at = i
		case "contexttokens":
			a.in = i
		case "generatedtokens":
			a.out = i
		}
	}
	if a.at < 0 || a.in < 0 || a.out < 0 {
		return nil, errors.New("read trace: neither a JSON object a line nor a header with TIMESTAMP, ContextTokens and GeneratedTokens")
	}
	return a, nil
}

func (a *azure) Next(r *Request) error {
	row, err := a.rows.Read()
	if errors.Is(err, io.EOF) {
		return io.EOF
	}
	if err != nil {
		return fmt.Errorf("read trace: %w", err)
	}
	a.line, _ = a.rows.FieldPos(0)
	text, _, _ := strings.Cut(strings.TrimSpace(row[a.at]), "+") // some of the traces end in an offset, always the same
	at, err := time.Parse(azureTime, text)
	if err != nil {
		return fmt.Errorf("read trace, line %d: %w", a.line, err)
	}
	if a.first.IsZero() {
		a.first = at
	}
	blocks := r.Blocks[:0]
	*r = Request{At: at.Sub(a.first), Blocks: blocks}
	if r.Prompt, err = strconv.Atoi(strings.TrimSpace(row[a.in])); err != nil {
		return fmt.Errorf("read trace, line %d: ContextTokens: %w", a.line, err)
	}
	if r.Output, err = strconv.Atoi(strings.TrimSpace(row[a.out])); err != nil {
		return fmt.Errorf("read trace, line %d: GeneratedTokens: %w", a.line, err)
	}
	if err := check(r, a.last, a.line); err != nil {
		return err
	}
	a.last = r.At
	return nil
}

var _ Reader = (*azure)(nil)
