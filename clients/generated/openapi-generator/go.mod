module counter.example/generated

go 1.23

require counter.example/openapi v0.0.0

replace counter.example/openapi => ./openapi
