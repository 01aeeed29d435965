# Says again, of the output of go test -v, which tests failed and what they said: at the end, where one looks, not minutes before.
# The logs of what a test had started are left out, and so is what was said beyond forty lines of a test.
/^=== (RUN|CONT|NAME) / { name = $3; next }
/^ *--- (PASS|SKIP|FAIL): / {
	if ($2 == "FAIL:" && !($3 in failed)) { failed[$3] = 1; order[++n] = $3 " " $4 }
	if ($0 ~ /^--- /) name = ""
	next
}
name != "" && !/^ *(time=|$)/ && count[name]++ < 40 { said[name] = said[name] substr($0, 1, 600) "\n" }
/^panic: |^fatal error: |^FAIL.*timed out/ { died = died $0 "\n" }
END {
	if (n || died != "") print "== what failed"
	printf "%s", died
	for (i = 1; i <= n; i++) { split(order[i], t, " "); print "FAIL: " order[i]; printf "%s", said[t[1]] }
}
