package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/headrace/headrace/bench/profiler"
	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/sidecar"
	"github.com/headrace/headrace/scheduler/profile"
	"github.com/headrace/headrace/worker/standin"
)

// degreeMark stands for the degree of parallelism in what starts engines.
const degreeMark = "{tp}"

// profileFlags are what `headrace profile` is told.
type profileFlags struct {
	o         profiler.Options
	e         engineFlags
	standin   bool
	table     string
	url       string
	reference string
	ttft, itl time.Duration
	request   time.Duration
	asJSON    bool
}

func (a *app) profile() *cobra.Command {
	var f profileFlags
	cmd := &cobra.Command{
		Use:   "profile [flags] [-- ARGUMENTS OF THE ENGINE]",
		Short: "Measure engines into the tables that the planner reads",
		Long: `Profile times prompts and streams on an engine, at each degree of parallelism of --tp, and writes what planning needs into a
folder: a timing table (headrace plan replay --table FILE), surfaces of the time to the first token and between tokens, which
engine to use for prefill and for decode within --ttft and --itl, and bounds for the planner (docs/profiling.md).

It starts the engines itself: Headrace's own from a GGUF file (--model), a stand-in (--standin), vLLM (--engine) or any other
(--command, where ` + degreeMark + ` is the degree), or measures one that runs (--url). Each point is on disk before the next: a run that was
ended goes on with the same command. A sweep in which an engine fails keeps the others' points, and ends with status 1.`,
		Example: `  headrace profile --standin --ttft 500ms --itl 40ms
  headrace profile --model llama.gguf --tp 1,2 --out llama -- --kv-memory 256MiB
  headrace profile --engine vllm --model /models/llama --tp 1,2,4,8 --ttft 300ms --itl 20ms --isl 3000 --osl 300
  headrace profile --command 'my-server --weights {model} --bind {host}:{port} --ranks {tp}' --model w.bin --kv-tokens 200000
  headrace profile --url http://10.0.0.7:8000
  headrace profile --reference llama2-70b-h100 --ttft 400ms --itl 60ms --out h100`,
		Args: afterDash,
	}
	fs := cmd.Flags()
	s := &f.o.Setup
	fs.BoolVar(&f.standin, "standin", false, "start stand-ins, which take the time that --table says")
	fs.StringVar(&f.table, "table", "", "`file` with a stand-in's timings, "+degreeMark+" in it is the degree (default: a mid-size GPU)")
	fs.StringVar(&f.url, "url", "", "`URL` of an engine that runs: http://HOST:PORT")
	fs.StringVar(&f.reference, "reference", "", "measure nothing: take what others published, by `name`: "+strings.Join(profile.References(), ", "))
	fs.StringVar(&f.e.engine, "engine", "", "`template` of the engines: vllm, which is measured without a connector")
	fs.StringVar(&f.e.command, "command", "", "command `line` of engines of another kind, with headrace engine's placeholders and "+degreeMark)
	fs.StringArrayVar(&f.e.env, "env", nil, "variable of the engines' environment, `NAME=VALUE`; may be repeated")
	fs.StringVar(&f.e.python, "python", "", "Python `interpreter` that has vLLM (default: the one of the vllm on PATH)")
	fs.StringVar(&f.e.device, "device", "auto", "auto, cpu or cuda: what vLLM runs on")
	fs.StringSliceVar(&f.e.gpus, "gpus", nil, "GPUs, as CUDA_VISIBLE_DEVICES has them: `0,1`; an engine gets as many as its degree (default: all are seen)")
	fs.StringVar(&f.e.model, "model", "", "GGUF `file` for Headrace's own engine, and what {model} is for others")
	fs.StringVar(&f.e.modelName, "model-name", "", "what clients call the model (default: the file's or folder's name)")
	addSpan(fs, &f.e.start, "start-timeout", sidecar.StartTimeout, "how long an engine may take until it answers")
	addSpan(fs, &f.request, "request-timeout", 10*time.Minute, "how long a request may take")
	fs.IntSliceVar(&s.Degrees, "tp", []int{1}, "degrees of parallelism, each an engine on as many GPUs")
	fs.IntSliceVar(&s.Prompts, "prompts", []int{64, 128, 256, 512, 1024, 2048, 4096, 8192}, "lengths of prompts in tokens; longer than the engine takes are left out")
	fs.Float64SliceVar(&s.Cached, "cached", []float64{0, 0.5}, "shares of prompts that are computed before, in the engine's prefix cache")
	fs.IntSliceVar(&s.Context, "contexts", []int{256, 1024, 4096}, "tokens of context of streams; longer than the engine takes are left out")
	fs.Float64SliceVar(&s.Usages, "kv-usage", []float64{0.1, 0.25, 0.5, 0.75, 0.95}, "shares of the KV cache that streams take; one stream is measured beside")
	fs.IntVar(&s.Rounds, "rounds", 3, "measurements of each point, of which the median counts")
	fs.IntVar(&s.Tokens, "timed-tokens", 32, "tokens of each stream that are timed")
	fs.Int64Var(&s.KV, "kv-tokens", 0, "tokens that the KV cache of an engine holds (default: as it says)")
	fs.IntVar(&s.Streams, "streams", 256, "streams that an engine takes at once")
	fs.IntVar(&f.o.Chunk, "chunk-tokens", 0, "tokens of prompts in one step (default: what fits the times best)")
	fs.DurationVar(&f.ttft, "ttft", 2*time.Second, "goal for the time to the first token")
	fs.DurationVar(&f.itl, "itl", 50*time.Millisecond, "goal for the time between tokens")
	fs.IntVar(&f.o.Goals.Prompt, "isl", 1024, "tokens of the prompts that the goals are for")
	fs.IntVar(&f.o.Goals.Output, "osl", 256, "tokens of the answers")
	fs.Float64Var(&f.o.TokenBytes, "kv-bytes-per-token", 131072, "bytes of KV cache a token, for the table's channel: it is not measured")
	fs.Float64Var(&f.o.ChannelBps, "channel-rate", 2.9e9, "bytes a second from prefill to decode, for the table: it is not measured")
	fs.StringVar(&f.o.Name, "name", "", "of the table (default: the model's)")
	fs.StringVar(&f.o.Dir, "out", "profile", "`folder` for points and results")
	fs.BoolVar(&f.o.Restart, "restart", false, "throw away what the folder has and begin anew")
	fs.BoolVar(&f.asJSON, "json", false, "print one JSON document")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		f.e.shape.Args = args
		if err := f.ready(); err != nil {
			return config.Misused(err)
		}
		if f.reference != "" {
			return a.published(&f)
		}
		return a.runProfile(cmd, &f)
	}
	return cmd
}

// ready checks what was given before anything is started.
func (f *profileFlags) ready() error {
	given := 0
	for _, is := range []bool{f.standin, f.url != "", f.e.engine != "", f.e.command != "", f.reference != ""} {
		if is {
			given++
		}
	}
	o := &f.o
	switch {
	case given > 1:
		return errors.New("give one of --standin, --url, --engine, --command and --reference")
	case given == 0 && f.e.model == "":
		return errors.New("what is to be measured? Give --model FILE, --standin, --engine, --command, --url or --reference")
	case f.table != "" && !f.standin:
		return errors.New("--table is for --standin")
	case f.url != "" && (len(f.e.shape.Args) > 0 || len(f.e.env) > 0):
		return errors.New("--url names an engine that runs: --env and arguments behind -- are of no use")
	case f.url != "" && len(o.Setup.Degrees) != 1:
		return errors.New("--url names one engine: give one degree with --tp, on how many GPUs it runs")
	case o.Chunk < 0 || o.TokenBytes < 0 || !(o.ChannelBps > 0):
		return errors.New("--chunk-tokens and --kv-bytes-per-token cannot be negative, and --channel-rate must be above 0")
	case o.Dir == "":
		return errors.New("--out is empty: name a folder")
	}
	if err := f.readyEngine(); err != nil {
		return err
	}
	o.Goals.TTFT, o.Goals.ITL = f.ttft.Seconds()*1e3, f.itl.Seconds()*1e3
	if err := o.Goals.Check(); err != nil {
		return err
	}
	return o.Setup.Check()
}

// readyEngine checks what says how engines are found or started.
func (f *profileFlags) readyEngine() error {
	if f.url != "" {
		u, err := url.Parse(f.url)
		if err != nil || u.Scheme != "http" || u.Host == "" || strings.Trim(u.Path, "/") != "" {
			return fmt.Errorf("--url %q: use http://HOST:PORT", f.url)
		}
		f.url = "http://" + u.Host
	}
	switch f.e.engine {
	case "", "vllm-plain":
	case "vllm":
		f.e.engine = "vllm-plain" // nothing is handed over here, and so the connector is not needed
	default:
		return fmt.Errorf("--engine %q: use vllm, or --command for another engine", f.e.engine)
	}
	for _, v := range f.e.env {
		if name, _, ok := strings.Cut(v, "="); !ok || name == "" {
			return fmt.Errorf("--env %q: use NAME=VALUE", v)
		}
	}
	if f.e.command != "" {
		if _, err := sidecar.ParseTemplate(strings.ReplaceAll(f.e.command, degreeMark, "1")); err != nil {
			return fmt.Errorf("--command: %w", err)
		}
	}
	return nil
}

// published makes tables of a reference.
func (a *app) published(f *profileFlags) error {
	ref, err := profile.ReferenceNamed(f.reference)
	if err != nil {
		return config.Misused(fmt.Errorf("--reference: %w", err))
	}
	r, err := profile.Analyze(ref.Input(f.o.Goals, f.o.ChannelBps))
	if err == nil {
		err = profiler.Write(f.o.Dir, r)
	}
	if err != nil {
		return err
	}
	if !f.asJSON {
		fmt.Fprintln(a.out, r.Note+"\n")
	}
	return profiler.Print(a.out, f.o.Dir, r, f.asJSON)
}

func (a *app) runProfile(cmd *cobra.Command, f *profileFlags) error {
	if _, err := a.logger(); err != nil {
		return err
	}
	ctx, stop := signalled(cmd, 0, true)
	defer stop()
	o := &f.o
	// Many streams run at once, and each engine has connections of its own.
	o.HTTP = &http.Client{Timeout: f.request, Transport: &http.Transport{MaxIdleConnsPerHost: 1 << 16, DisableCompression: true}}
	o.Setup.Version = 1
	if f.url != "" {
		o.Setup.Engine = f.url
		o.Start = profiler.Find(f.url, o.HTTP)
	} else {
		l, err := f.launcher(ctx)
		if err != nil {
			return err
		}
		log, err := profiler.OpenLog(o.Dir)
		if err != nil {
			return err
		}
		defer log.Close()
		l.Output, l.Logger, l.StartTimeout = log, slog.New(slog.NewTextHandler(log, nil)), f.e.start
		o.Start = l.Start
	}
	o.Name = cmp.Or(o.Name, f.name())
	o.Progress = profiler.NewProgress(a.err, term.IsTerminal(int(os.Stderr.Fd())))
	r, err := profiler.Run(ctx, *o)
	if r != nil {
		err = errors.Join(err, profiler.Print(a.out, o.Dir, r, f.asJSON))
	}
	return err
}

// name is the table's.
func (f *profileFlags) name() string {
	switch {
	case f.standin:
		return "stand-in"
	case f.url != "":
		return f.url
	}
	return cmp.Or(f.e.modelName, strings.TrimSuffix(filepath.Base(f.e.model), ".gguf"))
}

// launcher says how engines are started, and in the set-up what must stay the same for their points to be of use.
func (f *profileFlags) launcher(ctx context.Context) (*profiler.Launcher, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this binary: %w", err)
	}
	e := &f.e
	l := &profiler.Launcher{Model: e.model, ModelName: e.modelName, Env: e.env, GPUs: e.gpus, Guard: []string{self, "engine-guard", "--"}}
	what := ""
	if e.engine != "" {
		if what, err = f.vllm(ctx, l); err != nil {
			return nil, err
		}
	} else {
		line := f.line(self)
		l.Template = func(degree int) (*sidecar.Template, error) {
			t, err := sidecar.ParseTemplate(strings.ReplaceAll(line, degreeMark, strconv.Itoa(degree)))
			if err == nil {
				t.Words = append(t.Words, e.shape.Args...)
			}
			return t, err
		}
		if what, err = f.identity(); err != nil {
			return nil, err
		}
	}
	f.o.Setup.Engine = strings.Join(append([]string{what}, append(e.shape.Args, e.env...)...), " ")
	return l, nil
}

// line is the command template of what is started.
func (f *profileFlags) line(self string) string {
	words := []string{self}
	switch {
	case f.e.command != "":
		return f.e.command
	case f.standin:
		if words = append(words, "standin", "--listen", "{host}:{port}"); f.table != "" {
			words = append(words, "--table", f.table)
		}
	default:
		words = append(words, "worker", "--listen", "{host}:{port}", "--model", "{model}", "--tensor-parallel", degreeMark)
		if f.e.modelName != "" {
			words = append(words, "--model-name", "{model-name}")
		}
	}
	return sidecar.JoinWords(words)
}

// identity tells what is started from other things: a stand-in by its tables, our own engine by its file.
func (f *profileFlags) identity() (string, error) {
	switch {
	case f.e.command != "":
		return strings.ReplaceAll(f.e.command, "{model}", f.e.model), nil
	case !f.standin:
		info, err := os.Stat(f.e.model)
		if err != nil {
			return "", config.Misused(fmt.Errorf("--model: %w", err))
		}
		return fmt.Sprintf("worker %s of %d bytes", f.e.model, info.Size()), nil
	}
	if f.table == "" {
		return "stand-in", nil
	}
	h := sha256.New()
	for _, degree := range f.o.Setup.Degrees {
		path := strings.ReplaceAll(f.table, degreeMark, strconv.Itoa(degree))
		if _, err := standin.LoadTable(path); err != nil {
			return "", config.Misused(fmt.Errorf("--table: %w", err))
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		h.Write(b)
	}
	return fmt.Sprintf("stand-in with table %s %.16x", f.table, h.Sum(nil)), nil
}

// vllm has the launcher start vLLM.
func (f *profileFlags) vllm(ctx context.Context, l *profiler.Launcher) (string, error) {
	e := &f.e
	v := &sidecar.Values{ModelName: e.modelName}
	if err := e.checkModel(v); err != nil {
		return "", err
	}
	python, err := sidecar.FindPython(ctx, e.python)
	if err != nil {
		return "", err
	}
	if err := python.Check(e.engine); err != nil {
		return "", err
	}
	l.ModelName, l.Python = v.ModelName, python.Executable
	if e.device == "auto" {
		e.device = sidecar.DetectDevice(len(e.gpus) > 0)
	}
	l.Template = func(degree int) (*sidecar.Template, error) {
		s := e.shape
		s.Device, s.TensorParallel = e.device, degree
		return sidecar.Named(e.engine, s)
	}
	return fmt.Sprintf("%s %s on %s", e.engine, e.model, e.device), nil
}
