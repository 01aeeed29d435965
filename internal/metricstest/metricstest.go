// Package metricstest holds docs/metrics.md against what a part's registry has. It must not know any metric.
package metricstest

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// writeEnv, when set, has Table write what it would compare with.
const writeEnv = "HEADRACE_WRITE_METRICS"

// metric is what a row says, as far as it can be told from a registry.
type metric struct {
	name, help string
	labels     []string
	kind       string // "" where nothing was gathered
}

// How a prometheus.Desc writes itself, which is all that it gives away.
var (
	descForm  = regexp.MustCompile(`^Desc\{fqName: "([^"]*)", help: ("(?:[^"\\]|\\.)*"), (?:unit: "[^"]*", )?constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)
	constForm = regexp.MustCompile(`(\w+)="`)
)

// Table fails t unless the file doc has, behind the line "## heading", a table with a row for each metric of reg but those of Go and of the
// process: name, type, labels, meaning, as reg has them, by name. Types that reg has gathered nothing of are believed, unless the name
// says another one. With HEADRACE_WRITE_METRICS=1 the table is written instead.
func Table(t *testing.T, reg *prometheus.Registry, doc, heading string) {
	t.Helper()
	b, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	from := strings.Index(text, "\n## "+heading+"\n")
	if from < 0 {
		t.Fatalf("%s has no heading %q", doc, heading)
	}
	section := text[from+1:]
	if end := strings.Index(section[3:], "\n## "); end >= 0 {
		section = section[:end+4]
	}
	at := strings.Index(section, "\n| metric |")
	if at < 0 {
		t.Fatalf("%s has no table below %q", doc, heading)
	}
	got, rest, _ := strings.Cut(section[at+1:], "\n\n")
	want := table(metrics(t, reg), strings.Split(got, "\n"))
	if os.Getenv(writeEnv) != "" {
		text = strings.Replace(text, section, section[:at+1]+want+"\n\n"+rest, 1)
		if err := os.WriteFile(doc, []byte(strings.TrimRight(text, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, need := strings.Split(strings.TrimSpace(got), "\n"), strings.Split(want, "\n")
	for _, row := range need {
		if !slices.Contains(have, row) {
			t.Errorf("%s lacks, below %q:\n%s", doc, heading, row)
		}
	}
	for _, row := range have {
		if !slices.Contains(need, row) {
			t.Errorf("%s has, below %q, what is not so (%s=1 writes what is):\n%s", doc, heading, writeEnv, row)
		}
	}
}

// metrics reads a registry.
func metrics(t *testing.T, reg *prometheus.Registry) []metric {
	t.Helper()
	descs := make(chan *prometheus.Desc)
	go func() { reg.Describe(descs); close(descs) }()
	byName := map[string]metric{}
	for d := range descs {
		p := descForm.FindStringSubmatch(d.String())
		if p == nil {
			t.Errorf("cannot read %s", d)
			continue
		}
		m := metric{name: p[1]}
		if strings.HasPrefix(m.name, "go_") || strings.HasPrefix(m.name, "process_") {
			continue
		}
		if m.help, _ = strconv.Unquote(p[2]); m.help == "" {
			t.Errorf("%s says nothing of itself", m.name)
		}
		for _, c := range constForm.FindAllStringSubmatch(p[3], -1) {
			m.labels = append(m.labels, c[1])
		}
		if p[4] != "" {
			m.labels = append(m.labels, strings.Split(p[4], ",")...)
		}
		slices.Sort(m.labels)
		byName[m.name] = m
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if m, ok := byName[f.GetName()]; ok {
			m.kind = strings.ToLower(f.GetType().String())
			byName[m.name] = m
		}
	}
	var list []metric
	for _, m := range byName {
		if counts := strings.HasSuffix(m.name, "_total"); m.kind == "" && counts {
			m.kind = "counter"
		} else if m.kind != "" && counts != (m.kind == "counter") {
			t.Errorf("%s is a %s: names of counters, and no others, end in _total", m.name, m.kind)
		}
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b metric) int { return strings.Compare(a.name, b.name) })
	return list
}

// table writes the rows. old are those of before, for the types that nobody else knows.
func table(list []metric, old []string) string {
	lines := []string{"| metric | type | labels | means |", "|---|---|---|---|"}
	for _, m := range list {
		if m.kind == "" {
			m.kind = "gauge"
			for _, row := range old {
				if p := strings.Split(row, " | "); len(p) > 1 && p[0] == "| `"+m.name+"`" && p[1] == "histogram" {
					m.kind = p[1]
				}
			}
		}
		labels := ""
		if len(m.labels) > 0 {
			labels = "`" + strings.Join(m.labels, "`, `") + "`"
		}
		lines = append(lines, fmt.Sprintf("| `%s` | %s | %s | %s |", m.name, m.kind, labels, strings.ReplaceAll(m.help, "|", "\\|")))
	}
	return strings.Join(lines, "\n")
}
