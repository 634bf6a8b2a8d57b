module hybridpd.dev/e2e/tooling/pause

go 1.24
