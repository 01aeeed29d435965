package prefix

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// counts are of one source.
type counts struct {
	events, stored, removed, cleared, resets, lost, orphaned, unheld, ignored, changed atomic.Uint64
}

// of are those that count blocks, with their names.
func (c *counts) of() [6]*atomic.Uint64 {
	return [...]*atomic.Uint64{&c.stored, &c.removed, &c.orphaned, &c.unheld, &c.ignored, &c.changed}
}

var countNames = [6]string{"stored", "removed", "orphaned", "unheld", "ignored", "changed"}

// figures are of the index.
type figures struct {
	lookups, looked, found, turnedAway atomic.Uint64
	evicted                            [4]atomic.Uint64 // by kind
	past                               counts           // of sources that have gone
}

// Status is what an index is like, for people to read.
type Status struct {
	Bytes      int64  `json:"bytes"` // of the heap
	Limit      int64  `json:"limit_bytes"`
	Entries    int    `json:"entries"`
	Lookups    uint64 `json:"lookups"`
	Looked     uint64 `json:"lookup_tokens"`
	Found      uint64 `json:"found_tokens"` // at the worker that had the most
	Waits      uint64 `json:"lookup_waits"` // reads that had to ask for the lock
	Evicted    uint64 `json:"evicted_blocks"`
	TurnedAway uint64 `json:"turned_away"` // events of sources that there was no place for

	Sources []SourceStatus `json:"sources,omitempty"`
}

// SourceStatus is what an index knows of one publisher of events or, Approximate, of what was routed to a worker.
type SourceStatus struct {
	Worker      string `json:"worker"`
	Incarnation string `json:"incarnation,omitempty"`
	Rank        int    `json:"rank"` // -1: approximate
	Approximate bool   `json:"approximate,omitempty"`
	Heard       bool   `json:"heard"` // has told something since it was last void
	BlockTokens uint32 `json:"block_tokens,omitempty"`
	Keys        int64  `json:"keys"` // contents that the engine has a name for

	Events   uint64 `json:"events"`
	Stored   uint64 `json:"stored"` // blocks, as all below
	Removed  uint64 `json:"removed"`
	Orphaned uint64 `json:"orphaned"` // behind a parent that is not known
	Unheld   uint64 `json:"unheld"`   // removed, and not known to be there
	Ignored  uint64 `json:"ignored"`  // in another medium, group or size than counts
	Changed  uint64 `json:"changed"`  // names that got another meaning
	Cleared  uint64 `json:"cleared"`  // times
	Resets   uint64 `json:"resets"`   // times
	Lost     uint64 `json:"lost_batches"`
}

// Status tells what the index is like.
func (x *Index) Status() Status {
	x.mu.Lock()
	st := Status{Bytes: x.table.bytes() + x.side + fixedBytes, Limit: x.cfg.Bytes, Entries: x.table.entries}
	x.mu.Unlock()
	f := &x.figures
	st.Lookups, st.Looked, st.Found, st.Waits, st.TurnedAway = f.lookups.Load(), f.looked.Load(), f.found.Load(), x.table.waits.Load(), f.turnedAway.Load()
	st.Evicted = f.evicted[kindKey].Load() + f.evicted[kindNoted].Load()
	for _, s := range x.shape.Load().sources {
		st.Sources = append(st.Sources, s.status())
	}
	slices.SortFunc(st.Sources, func(a, b SourceStatus) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Incarnation, b.Incarnation), cmp.Compare(a.Rank, b.Rank))
	})
	return st
}

func (s *source) status() SourceStatus {
	c := &s.counts
	st := SourceStatus{Worker: s.name.Worker, Incarnation: s.name.Incarnation, Rank: s.name.Rank, Approximate: s.noted, Heard: s.heard.Load(), Keys: s.keys.Load(),
		Events: c.events.Load(), Stored: c.stored.Load(), Removed: c.removed.Load(), Orphaned: c.orphaned.Load(), Unheld: c.unheld.Load(), Ignored: c.ignored.Load(),
		Changed: c.changed.Load(), Cleared: c.cleared.Load(), Resets: c.resets.Load(), Lost: c.lost.Load()}
	if at := s.seat.Load(); at != nil {
		st.BlockTokens = at.plane.blockTokens
	}
	return st
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("headrace_router_prefix_index_"+name, help, labels, nil)
}

var (
	descBytes                         = desc("bytes", "What the prefix index takes of the heap.")
	descLimit                         = desc("limit_bytes", "What it may take.")
	descEntries                       = desc("entries", "Entries of the prefix index: contents, and the names that engines have for them.")
	descLookups                       = desc("lookups_total", "Prompts looked up.")
	descTokens                        = desc("lookup_tokens_total", "Tokens of prompts looked up: all, and those found at the worker that had the most.", "which")
	descEvicted                       = desc("evicted_blocks_total", "Blocks driven out for want of memory, by how they were known.", "kind")
	descSources                       = desc("sources", "Publishers of events and workers known by what was routed to them, by kind.", "kind")
	descBlocks                        = desc("blocks", "Contents known, added up over workers, by how they are known.", "kind")
	descEvents                        = desc("event_blocks_total", "Blocks of KV events, by what became of them.", "what")
	descTurned                        = desc("turned_away_total", "Events that there was no place for a source of.")
	descsAll                          = []*prometheus.Desc{descBytes, descLimit, descEntries, descLookups, descTokens, descEvicted, descSources, descBlocks, descEvents, descTurned}
	_            prometheus.Collector = (*Index)(nil)
	kindsOfKnown                      = [2]string{"told", "noted"}
)

// Describe implements prometheus.Collector.
func (x *Index) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range descsAll {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (x *Index) Collect(ch chan<- prometheus.Metric) {
	st := x.Status()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge(descBytes, float64(st.Bytes))
	gauge(descLimit, float64(st.Limit))
	gauge(descEntries, float64(st.Entries))
	counter(descLookups, st.Lookups)
	counter(descTokens, st.Looked, "all")
	counter(descTokens, st.Found, "found")
	counter(descEvicted, x.figures.evicted[kindKey].Load(), kindsOfKnown[0])
	counter(descEvicted, x.figures.evicted[kindNoted].Load(), kindsOfKnown[1])
	counter(descTurned, st.TurnedAway)
	var sources, blocks [2]float64
	for _, s := range st.Sources {
		i := 0
		if s.Approximate {
			i = 1
		}
		sources[i]++
		blocks[i] += float64(s.Keys)
	}
	for i, kind := range kindsOfKnown {
		gauge(descSources, sources[i], kind)
		gauge(descBlocks, blocks[i], kind)
	}
	var sums [len(countNames)]uint64
	x.mu.Lock() // a source that goes is counted once
	for i, c := range x.figures.past.of() {
		sums[i] = c.Load()
	}
	for _, s := range x.shape.Load().sources {
		for i, c := range s.counts.of() {
			sums[i] += c.Load()
		}
	}
	x.mu.Unlock()
	for i, name := range countNames {
		counter(descEvents, sums[i], name)
	}
}
