// Command mkmodel writes the model files that golden.py gives to an independent engine: the default model with every
// tensor as F32, so that both engines compute with the same weights, and a tiny model from a seed.
package main

import (
	"fmt"
	"os"
	"strconv"

	"github.com/headrace/headrace/worker/gguf"
	"github.com/headrace/headrace/worker/tinymodel"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: mkmodel dequantize IN.gguf OUT.gguf\n       mkmodel tiny SEED OUT.gguf")
		os.Exit(2)
	}
	var err error
	switch os.Args[1] {
	case "dequantize":
		err = dequantize(os.Args[2], os.Args[3])
	case "tiny":
		err = tiny(os.Args[2], os.Args[3])
	default:
		err = fmt.Errorf("unknown mode %q", os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func dequantize(in, out string) error {
	f, err := gguf.Open(in)
	if err != nil {
		return err
	}
	defer f.Close()
	w, err := f.Dequantize()
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
