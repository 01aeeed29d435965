// Command mkmodel writes the model files that golden.py gives to an independent engine: the default model with every
// matrix in another type (as F32, both engines compute with the same weights), and a tiny model from a seed.
package main

import (
	"fmt"
	"os"
	"strconv"

	"github.com/headrace/headrace/internal/gguf"
	"github.com/headrace/headrace/worker/tinymodel"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: mkmodel F32|F16|BF16|Q8_0|Q4_0|Q4_1 IN.gguf OUT.gguf\n       mkmodel tiny SEED OUT.gguf")
		os.Exit(2)
	}
	var err error
	switch os.Args[1] {
	case "tiny":
		err = tiny(os.Args[2], os.Args[3])
	default:
		err = convert(os.Args[1], os.Args[2], os.Args[3])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func convert(name, in, out string) error {
	t, err := gguf.ParseType(name)
	if err != nil {
		return err
	}
	f, err := gguf.Open(in)
	if err != nil {
		return err
	}
	defer f.Close()
	w, err := f.Convert(t)
	if err != nil {
		return err
	}
	return w.WriteFile(out)
}

func tiny(seed, out string) error {
	n, err := strconv.ParseUint(seed, 10, 64)
	if err != nil {
		return err
	}
	return tinymodel.Write(out, tinymodel.Options{Seed: n})
}
