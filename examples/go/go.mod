module gradcodec-example

go 1.19
