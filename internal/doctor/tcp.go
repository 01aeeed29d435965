package doctor

import (
	"fmt"
	"strconv"
	"strings"
)

// socketBufferWanted keeps a lane of 25 Gbit/s busy over half a millisecond.
const socketBufferWanted = 1 << 20

func (h *host) checkBuffers() Check {
	const name = "buffers"
	text := h.text("proc/sys/net/ipv4/tcp_wmem")
	fields := strings.Fields(text)
	if len(fields) != 3 {
		return unknown(name, "net.ipv4.tcp_wmem cannot be read")
	}
	limit, err := strconv.Atoi(fields[2])
	if err != nil {
		return unknown(name, "net.ipv4.tcp_wmem is "+strings.Join(fields, " "))
	}
	detail := fmt.Sprintf("up to %d KiB a stream", limit>>10)
	if limit >= socketBufferWanted {
		return yes(name, detail)
	}
	return lacking(name, detail, "a lane of 25 Gbit/s waits for acknowledgements", "sysctl -w net.ipv4.tcp_wmem='4096 65536 16777216' net.ipv4.tcp_rmem='4096 131072 16777216'")
}
