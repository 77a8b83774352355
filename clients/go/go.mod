module distributedcounter

go 1.19
