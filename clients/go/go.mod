module distributed-counter.example/go

go 1.19
