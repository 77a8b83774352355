module distributed-counter.example/clients/go

go 1.19
