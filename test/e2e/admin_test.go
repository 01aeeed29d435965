package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/transfer"
)

// adminClient gives up soon: a stopped process must not hold a test.
var adminClient = &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

func getJSON(url string, into any) error {
	resp, err := adminClient.Get(url)
	if err != nil {
		return err
	}
	return readJSON(resp, into)
}

func readJSON(resp *http.Response, into any) error {
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: status %d: %.300s", resp.Request.Method, resp.Request.URL, resp.StatusCode, data)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("read %s: %w: %.300s", resp.Request.URL, err, data)
	}
	return nil
}

// node is a daemon's admin side.
type node struct{ registry.Node }

func (n node) status() (transfer.Status, error) {
	var st transfer.Status
	err := getJSON("http://"+n.Admin+"/status", &st)
	return st, err
}

func (n node) do(path string, args url.Values) error {
	resp, err := adminClient.PostForm("http://"+n.Admin+path, args)
	if err != nil {
		return err
	}
	return readJSON(resp, nil)
}

// pause holds every transfer of this daemon at a point, after so many passages.
func (n node) pause(t testing.TB, point string, after int) {
	t.Helper()
	if err := n.do("/debug/pause", url.Values{"point": {point}, "after": {strconv.Itoa(after)}}); err != nil {
		t.Fatal(err)
	}
}

// release lets all go on. The daemon may have been killed meanwhile.
func (n node) release() error { return n.do("/debug/release", nil) }

// rate limits what this daemon sends; 0 lifts the limit.
func (n node) rate(bytesPerSecond int64) error {
	return n.do("/debug/rate", url.Values{"bytes_per_s": {strconv.FormatInt(bytesPerSecond, 10)}})
}

// held waits until someone is held at a point.
func (n node) held(t testing.TB, point string) {
	t.Helper()
	eventually(t, 10*time.Second, "a transfer is held at "+point, func() error {
		var waiting map[string]int
		if err := getJSON("http://"+n.Admin+"/debug/pauses", &waiting); err != nil {
			return err
		}
		if waiting[point] == 0 {
			return fmt.Errorf("nobody waits: %v", waiting)
		}
		return nil
	})
}

// moving waits until a transfer that this daemon sends is past its beginning.
func (n node) moving(t testing.TB) {
	t.Helper()
	eventually(t, 10*time.Second, "a transfer is under way", func() error {
		st, err := n.status()
		if err != nil {
			return err
		}
		for _, l := range st.Leases {
			if l.Side == "source" && l.UnitsDone > 0 && l.UnitsDone < l.UnitsWanted {
				return nil
			}
		}
		return fmt.Errorf("leases %+v", st.Leases)
	})
}

// worker is an engine's own HTTP server.
type worker struct{ registry.Worker }

func (w worker) url() string { return "http://" + w.Addr }

// workerStatus is what the tests read of a worker's /status.
type workerStatus struct {
	Node        string `json:"node"`
	Running     int    `json:"running"`
	Waiting     int    `json:"waiting"`
	Fencing     int    `json:"fencing"`
	Total       int    `json:"blocks_total"`
	Free        int    `json:"blocks_free"`
	Leased      int    `json:"blocks_leased"`
	Quarantined int    `json:"blocks_quarantined"`
	Counters    struct {
		PrefixHits, ExternalHits, PromptTokens, GenerationTokens uint64
	} `json:"counters"`
}

func (w worker) status() (workerStatus, error) {
	var st workerStatus
	err := getJSON(w.url()+"/status", &st)
	return st, err
}

// idle is nil when no block is lent or held and no request is in the worker.
func (w worker) idle() error {
	st, err := w.status()
	if err != nil {
		return err
	}
	if st.Total == 0 || st.Free != st.Total || st.Leased != 0 || st.Quarantined != 0 || st.Running != 0 || st.Waiting != 0 || st.Fencing != 0 {
		return fmt.Errorf("worker %s (%s): %+v", w.ID, w.Role, st)
	}
	return nil
}
