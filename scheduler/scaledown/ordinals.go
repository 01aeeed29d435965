package scaledown

// Vacant lists the n ordinals to create: the lowest that are in use by nobody. Ordinals that are still being deleted
// are in use.
func Vacant(used []int, n int) []int {
	out := make([]int, 0, max(n, 0))
	taken := make(map[int]bool, len(used))
	for _, o := range used {
		taken[o] = true
	}
	for o := 0; len(out) < n; o++ {
		if !taken[o] {
			out = append(out, o)
		}
	}
	return out
}
