// Package version says which build this is.
package version

import (
	"runtime"
	"runtime/debug"
)

// number is set by the linker (Makefile); builds by other means have the module's version or "devel".
var number string

// Info is what `headrace version` prints.
type Info struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// Get reads the build's own record.
func Get() Info {
	info := Info{Version: number, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if build, ok := debug.ReadBuildInfo(); ok {
		if info.Version == "" && build.Main.Version != "(devel)" {
			info.Version = build.Main.Version
		}
		for _, s := range build.Settings {
			switch s.Key {
			case "vcs.revision":
				info.Revision = s.Value
			case "vcs.modified":
				info.Modified = s.Value == "true"
			}
		}
	}
	if info.Version == "" {
		info.Version = "devel"
	}
	return info
}
