package profiler

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/headrace/headrace/scheduler/profile"
)

// results analyzes what there is and writes it.
func (s *sweep) results(partial bool) (*profile.Report, error) {
	o := s.o
	r, err := profile.Analyze(profile.Input{Name: o.Name, Note: o.Note, Engines: s.st.engines, Points: s.st.points, Goals: o.Goals, Chunk: o.Chunk,
		TokenBytes: o.TokenBytes, ChannelBps: o.ChannelBps, More: partial})
	if err != nil {
		return nil, err
	}
	return r, Write(o.Dir, r)
}

// Write writes a report's files into a folder: each is whole or the one that was there before.
func Write(dir string, r *profile.Report) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make folder for the profile: %w", err)
	}
	table, err := r.Table()
	if err != nil {
		r.TableNote = err.Error()
		if err := os.Remove(filepath.Join(dir, tableFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove what is no more: %w", err)
		}
	} else if err := replaceJSON(filepath.Join(dir, tableFile), table); err != nil {
		return err
	}
	if err := replaceJSON(filepath.Join(dir, reportFile), r); err != nil {
		return err
	}
	if !slices.ContainsFunc(r.Points, func(p profile.Point) bool { return p.Why == "" }) {
		return nil // there is nothing to draw
	}
	for name, draw := range map[string]func(io.Writer, *profile.Report) error{svgFile: SVG, htmlFile: HTML} {
		var b bytes.Buffer
		if err := draw(&b, r); err != nil {
			return fmt.Errorf("draw %s: %w", name, err)
		}
		if err := replace(filepath.Join(dir, name), b.Bytes()); err != nil {
			return err
		}
	}
	return nil
}

func replaceJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	return replace(path, append(b, '\n'))
}

func replace(path string, b []byte) error {
	err := os.WriteFile(path+".new", b, 0o644)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return fmt.Errorf("write the profile: %w", err)
	}
	return nil
}

// Print tells what came out.
func Print(w io.Writer, dir string, r *profile.Report, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%-7s %5s %10s %9s  %-28s %-28s %s\n", "degree", "GPUs", "KV tokens", "start", "prefill: step, token, pair", "decode: step, stream, token", "fit off by")
	for i := range r.Measured {
		m := &r.Measured[i]
		if m.Fit == nil {
			fmt.Fprintf(&b, "%-7d %5d %10d  %s\n", m.Degree, m.GPUs, m.KVTokens, m.Reason)
			continue
		}
		f := m.Fit
		fmt.Fprintf(&b, "%-7d %5d %10d %8.1fs  %-28s %-28s %.1f %%, %.1f %%\n", m.Degree, m.GPUs, m.KVTokens, m.StartMs/1e3,
			fmt.Sprintf("%.0f us, %.4g us, %.4g ps", f.PrefillStepUs, f.PromptTokenUs, f.PromptAttention),
			fmt.Sprintf("%.0f us, %.4g us, %.4g ns", f.DecodeStepUs, f.StreamUs, f.KVTokenNs), 100*f.PrefillOff, 100*f.DecodeOff)
		if m.Failed != "" {
			fmt.Fprintf(&b, "        not complete: %s\n", m.Failed)
		}
	}
	printChoice(&b, r)
	if dir != "" {
		fmt.Fprintf(&b, "\nwritten to %s: %s, %s", dir, reportFile, htmlFile)
		if r.TableNote == "" {
			fmt.Fprintf(&b, ", %s (headrace plan replay --table %s)", tableFile, filepath.Join(dir, tableFile))
		}
		fmt.Fprintln(&b)
	}
	_, err := w.Write(b.Bytes())
	return err
}

func printChoice(b *bytes.Buffer, r *profile.Report) {
	c, g := &r.Choice, &r.Goals
	fmt.Fprintf(b, "\ngoals: first token within %.4g ms, others %.4g ms apart, for %d tokens in and %d out\n", g.TTFT, g.ITL, g.Prompt, g.Output)
	if c.Why != "" {
		fmt.Fprintf(b, "not met: %s\n", c.Why)
	}
	if c.Prefill.Degree == 0 {
		return
	}
	mark := func(e *profile.EngineChoice) string {
		if e.Extrapolated {
			return " (beyond what was measured)"
		}
		return ""
	}
	fmt.Fprintf(b, "prefill: degree %d: %.4g ms, %.5g tokens/s a GPU%s\n", c.Prefill.Degree, c.Prefill.Ms, c.Prefill.PerGPU, mark(&c.Prefill))
	fmt.Fprintf(b, "decode:  degree %d: %d streams, %.4g ms, %.5g tokens/s a GPU, %.0f %% of the KV cache%s\n", c.Decode.Degree, c.Decode.Streams, c.Decode.Ms, c.Decode.PerGPU, 100*c.Decode.KVUsage, mark(&c.Decode))
	fmt.Fprintf(b, "bounds:  --planner %s\n", c.Planner())
}
