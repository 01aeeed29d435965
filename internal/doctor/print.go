package doctor

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
)

// Print writes the report: a table with remedies, or with asJSON the document.
func (r *Report) Print(w io.Writer, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false) // commands hold && and >
		enc.SetIndent("", "  ")
		return enc.Encode(struct {
			*Report
			OK bool `json:"ok"`
		}{r, r.OK()})
	}
	b := bufio.NewWriter(w)
	wide := 0
	for _, c := range r.Checks {
		wide = max(wide, len(c.Name))
	}
	last := ""
	for _, c := range r.Checks {
		if c.Group != last {
			fmt.Fprintln(b, c.Group)
			last = c.Group
		}
		fmt.Fprintf(b, "  %-7s  %-*s  %s\n", c.Answer, wide, c.Name, c.Detail)
		if c.Remedy != "" {
			fmt.Fprintf(b, "  %-7s  %-*s    %s\n", "", wide, "", c.Remedy)
		}
		if c.Command != "" {
			fmt.Fprintf(b, "  %-7s  %-*s    %s %s\n", "", wide, "", prompt(c.Host), c.Command)
		}
	}
	return b.Flush()
}

// prompt says whose shell a command is for: root's, here or there.
func prompt(host string) string {
	if host == "" {
		return "#"
	}
	return host + " #"
}
