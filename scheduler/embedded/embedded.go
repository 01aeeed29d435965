// Package embedded names the JSON files that come with the program.
package embedded

import (
	"embed"
	"strings"
)

// Names are those of a folder's files, without the ending, in order.
func Names(files embed.FS, dir string) []string {
	entries, err := files.ReadDir(dir)
	if err != nil {
		panic(err) // they are part of the binary
	}
	var names []string
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".json"))
	}
	return names
}
