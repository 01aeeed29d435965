// Package adminpage reads the pages in JSON of the parts' admin addresses. It must not know what stands on them.
package adminpage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

const (
	// Timeout is how long one part is waited for where nothing else is said: one that is stopped must not hold up the rest.
	Timeout = 2 * time.Second

	bytesMax = 8 << 20 // of a page
	wordsMax = 300     // of a part that refuses
)

// Refused is an answer that is no page.
type Refused struct {
	Path, Status string
	Code         int
	Words        string // the part's own
}

func (e *Refused) Error() string {
	return strings.TrimSuffix(fmt.Sprintf("GET %s: %s: %s", e.Path, e.Status, e.Words), ": ")
}

// Missing tells whether a part answered that it has no such page.
func Missing(err error) bool {
	var refused *Refused
	return errors.As(err, &refused) && refused.Code == http.StatusNotFound
}

// Get reads a page of the part whose admin listener is at addr, host:port, into what into points to.
func Get(ctx context.Context, client *http.Client, addr, path string, into any) error {
	if addr == "" {
		return errors.New("it has no admin address")
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		words, _ := io.ReadAll(io.LimitReader(resp.Body, wordsMax))
		return &Refused{Path: path, Status: resp.Status, Code: resp.StatusCode, Words: strings.TrimSpace(string(words))}
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, bytesMax)).Decode(into); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}
